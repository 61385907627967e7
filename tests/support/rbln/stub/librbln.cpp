// A stub of the vendor's runtime library: device memory is host memory.
//
// Signatures follow the symbols that the vendor's wheel needs and the headers of its public repository
// (RBLN-SW/torch-rbln, third_party/rebel_compiler). `vendor_packages.py` adds every other symbol; those return 0.
// STUB_RBLN_NPU is the NPU's name; empty, there is none.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

typedef enum { RBLNRetCode_SUCCESS = 0, RBLNRetCode_FAILURE, RBLNRetCode_INVALID } RBLNRetCode;

namespace {

std::mutex mutex;
std::map<uint64_t, uint64_t> sizes;  // by address of an allocation, its bytes

std::atomic<uint64_t> counters[4];

void count(int kind, uint64_t bytes) {
  counters[kind] += 1;
  counters[kind + 1] += bytes;
}

const uint64_t MEMORY = 16ull << 30;

int num_devices() {
  const char* name = std::getenv("STUB_RBLN_NPU");
  if (name && !*name) return 0;
  const char* number = std::getenv("STUB_RBLN_NPUS");
  return number ? std::atoi(number) : 1;
}

RBLNRetCode allocate(uint64_t size, uint64_t& address) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 512, size ? size : 512)) return RBLNRetCode_FAILURE;
  // Like a device's memory, it holds anything at first: NaN for every floating-point type.
  std::memset(memory, 0xff, size);
  address = reinterpret_cast<uint64_t>(memory);
  std::lock_guard<std::mutex> guard(mutex);
  sizes[address] = size;
  return RBLNRetCode_SUCCESS;
}

// Returns the allocation that holds an address; 0 if there is none.
uint64_t allocation_of(uint64_t address) {
  std::lock_guard<std::mutex> guard(mutex);
  auto after = sizes.upper_bound(address);
  if (after == sizes.begin()) return 0;
  auto found = std::prev(after);
  return address < found->first + std::max<uint64_t>(found->second, 1) ? found->first : 0;
}

RBLNRetCode copy(uint64_t source, uint64_t target, uint64_t size) {
  std::memmove(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), size);
  return RBLNRetCode_SUCCESS;
}

}  // namespace

extern "C" {

int rbln_abi_min_supported() { return 1; }
int rbln_abi_current() { return 1000; }
bool rbln_runtime_available() { return true; }
RBLNRetCode rbln_get_device_count(int* count) {
  *count = num_devices();
  return RBLNRetCode_SUCCESS;
}
struct Properties {
  char name[16];
  uint64_t total_memory;
  uint64_t memory_per_chiplet;
  int32_t num_chiplet;
};
RBLNRetCode rbln_get_device_properties(int, Properties* out) {
  const char* name = std::getenv("STUB_RBLN_NPU");
  std::snprintf(out->name, sizeof out->name, "%s", name ? name : "RBLN-CA25");
  out->total_memory = out->memory_per_chiplet = MEMORY;
  out->num_chiplet = 1;
  return RBLNRetCode_SUCCESS;
}

// Found by reading what `torch.rbln.mem_get_info` makes of each word; chiplets follow and stay 0.
struct DeviceMemory {
  uint64_t total, used, free, huge_granularity, granularity;
};
RBLNRetCode rbln_get_device_memory_info(int, DeviceMemory* out) {
  std::lock_guard<std::mutex> guard(mutex);
  uint64_t used = 0;
  for (auto& each : sizes) used += each.second;
  *out = {MEMORY, used, MEMORY - used, 0, 0};
  return RBLNRetCode_SUCCESS;
}

// What a bench reads: calls and bytes of copies from host to device, then of copies back.
uint64_t stub_rbln_counter(int index) { return counters[index]; }
}

namespace rbln {

enum class DataType : int { Undefined };
struct MemoryInfo {
  uint32_t torch_device_id;
  uint64_t key_vaddr;
  DataType user_dtype;
  std::vector<int64_t> user_shape;
  DataType physical_dtype;
  std::vector<int64_t> physical_shape;
};
typedef std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> Copies;

RBLNRetCode rbln_malloc_lazy(uint32_t, uint64_t size, uint64_t& address) { return allocate(size, address); }
RBLNRetCode rbln_malloc_eager(uint32_t, uint64_t size, uint64_t& address) { return allocate(size, address); }
RBLNRetCode rbln_free(uint64_t address) {
  std::lock_guard<std::mutex> guard(mutex);
  if (!sizes.erase(address)) return RBLNRetCode_INVALID;
  std::free(reinterpret_cast<void*>(address));
  return RBLNRetCode_SUCCESS;
}
RBLNRetCode rbln_mark_zeros(uint64_t address) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = sizes.find(address);
  if (found == sizes.end()) return RBLNRetCode_INVALID;
  std::memset(reinterpret_cast<void*>(address), 0, found->second);
  return RBLNRetCode_SUCCESS;
}
RBLNRetCode rbln_memcpy_h2v(uint64_t source, uint64_t target, uint64_t size) {
  count(0, size);
  return copy(source, target, size);
}
RBLNRetCode rbln_memcpy_v2h(uint64_t source, uint64_t target, uint64_t size) {
  count(2, size);
  return copy(source, target, size);
}
RBLNRetCode rbln_memcpy_v2v(uint64_t source, uint64_t target, uint64_t size) { return copy(source, target, size); }
RBLNRetCode rbln_memcpy_h2v_async(uint64_t source, uint64_t target, uint64_t size, uint64_t*) {
  return rbln_memcpy_h2v(source, target, size);
}
RBLNRetCode rbln_memcpy_v2h_async(uint64_t source, uint64_t target, uint64_t size, uint64_t*) {
  return rbln_memcpy_v2h(source, target, size);
}
RBLNRetCode rbln_memcpy_v2v_async(uint64_t source, uint64_t target, uint64_t size, uint64_t*) {
  return copy(source, target, size);
}
RBLNRetCode rbln_memcpy_h2v_multi(const Copies& copies) {
  for (auto [source, target, size] : copies) rbln_memcpy_h2v(source, target, size);
  return RBLNRetCode_SUCCESS;
}
RBLNRetCode rbln_memcpy_v2h_multi(const Copies& copies) {
  for (auto [source, target, size] : copies) rbln_memcpy_v2h(source, target, size);
  return RBLNRetCode_SUCCESS;
}
RBLNRetCode rbln_memcpy_v2v_multi(const Copies& copies) {
  for (auto [source, target, size] : copies) copy(source, target, size);
  return RBLNRetCode_SUCCESS;
}
RBLNRetCode rbln_v_borrow_host_ptr(uint64_t address, uint64_t, uint64_t& host, uint64_t& loan) {
  host = loan = address;
  return allocation_of(address) ? RBLNRetCode_SUCCESS : RBLNRetCode_FAILURE;
}
RBLNRetCode rbln_v_acquire_host_ptr_for_overwrite(uint64_t address, uint64_t, uint64_t& host, uint64_t& loan) {
  host = loan = address;
  return RBLNRetCode_SUCCESS;
}
RBLNRetCode rbln_get_torch_device_id_from_vaddr(uint64_t, uint32_t& device) {
  device = 0;
  return RBLNRetCode_SUCCESS;
}
RBLNRetCode rbln_get_memory_info(uint64_t address, MemoryInfo& info) {
  info.torch_device_id = 0;
  info.key_vaddr = allocation_of(address);
  return info.key_vaddr ? RBLNRetCode_SUCCESS : RBLNRetCode_FAILURE;
}
RBLNRetCode rbln_event_query(uint64_t, bool* done) {
  *done = true;
  return RBLNRetCode_SUCCESS;
}
RBLNRetCode rbln_stream_query(uint64_t, bool* done) {
  *done = true;
  return RBLNRetCode_SUCCESS;
}

}  // namespace rbln
