// Collectives of the vendor's runtime for the ranks of one host. Signatures follow the symbols that the wheel
// imports and rbln_rccl.h of the vendor's public repository.
//
// All ranks map one anonymous file of rank 0 and lock a byte of it, so nothing is left when they end, however
// they end. Each message travels in a box, which is free again once all its readers have read it.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <iterator>
#include <linux/futex.h>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

typedef enum { RBLNRetCode_SUCCESS = 0, RBLNRetCode_FAILURE, RBLNRetCode_INVALID } RBLNRetCode;

struct rccl_unique_id {
  char root_ip[16];
  char self_ip[16];
  char self_rdma_ip[16];
  int root_port;
  int rdma_base_port;
};
struct rccl_extra_args;

namespace rbln {

// Of librbln.cpp: where an address of the device lies in host memory.
RBLNRetCode rbln_v_borrow_host_ptr(uint64_t address, uint64_t size, uint64_t& host, uint64_t& loan);

class Rccl {
 public:
  enum class RcclDataType : int { Int8, CustomFloat16, BFloat16 };
  enum class RcclReduceOp : int { Sum, Mul, Max, Min, Avg };

  Rccl();
  ~Rccl();
  RBLNRetCode PrepareContextAndExportMem(int device);
  RBLNRetCode GetUniqueIdForBroadcast(rccl_unique_id* id);
  RBLNRetCode InitWithUniqueId(int rank, int size, int group, const std::vector<int>& ranks, int device,
                               const rccl_unique_id* id);
  RBLNRetCode Init(int rank, int size, int group, const std::vector<int>& ranks, int device);
  RBLNRetCode Send(void* from, int count, RcclDataType type, int peer, rccl_extra_args*);
  RBLNRetCode Recv(void* to, int count, RcclDataType type, int peer, rccl_extra_args*);
  RBLNRetCode Broadcast(void* from, void* to, int count, RcclDataType type, int root, rccl_extra_args*);
  RBLNRetCode AllGather(void* from, const std::vector<void*>& to, int count, RcclDataType type, int root,
                        rccl_extra_args*);
  RBLNRetCode AllReduce(void* from, void* to, int count, RcclDataType type, RcclReduceOp op, int root,
                        rccl_extra_args*);
  RBLNRetCode Scatter(const std::vector<void*>& from, void* to, int count, RcclDataType type, int root,
                      rccl_extra_args*);
  RBLNRetCode ReduceScatter(const std::vector<void*>& from, void* to, int count, RcclDataType type,
                            RcclReduceOp op, int root, rccl_extra_args*);
  RBLNRetCode CheckChunksDeviceAddrsContiguous(const std::vector<void*>& chunks, int count, RcclDataType type,
                                               const char* what);

 private:
  struct Member* member_;  // the wheel allocates this object, with more room than a pointer needs
};

}  // namespace rbln

namespace {

using rbln::Rccl;
typedef Rccl::RcclDataType Type;
typedef Rccl::RcclReduceOp Op;

constexpr int RANKS = 8, GROUPS = 32;
constexpr uint64_t CHUNK = 256 << 10;
constexpr uint64_t GATHER_ALIGNMENT = 128, UNIT = 512;
constexpr uint64_t MAX_REDUCE = 1 << 20, MAX_REDUCE_SCATTER = 32 << 20, MAX_GATHER = 1 << 30;

enum Kind { SEND, BROADCAST, ALL_GATHER, ALL_REDUCE, SCATTER, REDUCE_SCATTER };

// What all ranks must say alike of a collective, and both ends of a message.
struct Call {
  int kind, type, op, root;
  uint64_t bytes;
  bool operator==(const Call& other) const { return !std::memcmp(this, &other, sizeof *this); }
};

struct Box {
  std::atomic<uint64_t> sent, read[RANKS];
  Call call;
  char data[CHUNK];
};

struct Group {
  std::atomic<uint64_t> name;
  std::atomic<uint32_t> news;  // changes with each message and each reading; ranks wait for it
  Box boxes[RANKS][RANKS];     // by source and target; a collective uses those from a rank to itself
};

struct World {
  std::atomic<uint32_t> joined[RANKS];
  Group groups[GROUPS];
};

// This process's default group.
World* world = nullptr;
int world_file = -1;

std::chrono::seconds limit() {
  const char* value = std::getenv("STUB_RBLN_CCL_LIMIT_S");
  return std::chrono::seconds(value ? std::atoi(value) : 120);
}

RBLNRetCode refuse(const std::string& reason) {
  std::fprintf(stderr, "stub rccl: %s\n", reason.c_str());
  return RBLNRetCode_INVALID;
}

// Says once a kind that the process took part in one, so tests know which ones ran here.
void note(Kind kind) {
  static const char* names[] = {"message", "broadcast", "all-gather", "all-reduce", "scatter", "reduce-scatter"};
  static std::atomic<bool> noted[std::size(names)];
  if (!noted[kind].exchange(true)) std::fprintf(stderr, "stub rccl ran: %s\n", names[kind]);
}

World* map_world(int file) {
  void* memory = mmap(nullptr, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<World*>(memory);
}

struct flock byte_of(int rank, short type) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

bool is_alive(int rank) {
  struct flock lock = byte_of(rank, F_WRLCK);
  return fcntl(world_file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

bool environment_says(const char* name, int value) {
  const char* given = std::getenv(name);
  return given && std::atoi(given) == value;
}

uint64_t size_of(Type type) { return type == Type::Int8 ? 1 : 2; }

// Takes subnormal numbers, infinities and NaN, as `_Float16` needs a newer compiler.
float from_half(uint16_t half) {
  int exponent = half >> 10 & 31, fraction = half & 1023;
  float size = exponent == 31 ? (fraction ? NAN : INFINITY)
               : exponent     ? std::ldexp(1024.f + fraction, exponent - 25)
                              : std::ldexp(float(fraction), -24);
  return half >> 15 ? -size : size;
}

uint16_t to_half(float value) {
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  float size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (size >= 65520.f) return sign | 0x7c00;  // rounds to infinity
  int exponent = size > 0 ? std::max(std::ilogb(size), -14) : -14;
  // Steps of this exponent, rounded to even; a carry goes into the exponent's bits by itself.
  int steps = int(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return sign | uint16_t(((exponent + 14) << 10) + steps);
}

float reduced(float sum, float value, Op op) {
  if (op == Op::Max) return std::fmax(sum, value);
  if (op == Op::Min) return std::fmin(sum, value);
  return sum + value;
}

}  // namespace

namespace rbln {

// This process's place in a group.
struct Member {
  int rank = -1, size = 0;
  std::vector<int> ranks;  // of the default group, by rank of this group
  Group* group = nullptr;
  bool exported = false;

  bool await(const std::vector<int>& peers, const std::atomic<uint32_t>& news, const std::function<bool()>& done) {
    auto end = std::chrono::steady_clock::now() + limit();
    while (true) {
      uint32_t seen = news;
      if (done()) return true;
      timespec pause = {0, 50'000'000};
      syscall(SYS_futex, &news, FUTEX_WAIT, seen, &pause, nullptr, 0);
      for (int peer : peers) {
        // A process never meets its own lock.
        if (peer != ranks[rank] && world->joined[peer] && !is_alive(peer) && !done()) {
          refuse("rank " + std::to_string(peer) + " is gone");
          return false;
        }
      }
      if (std::chrono::steady_clock::now() > end) {
        refuse("another rank did not come within the limit");
        return false;
      }
    }
  }

  void tell() {
    group->news += 1;
    syscall(SYS_futex, &group->news, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  bool write(Box& box, const std::vector<int>& readers, const Call& call, const char* data, uint64_t bytes) {
    std::vector<int> peers;
    for (int reader : readers) peers.push_back(ranks[reader]);
    bool free = await(peers, group->news, [&] {
      for (int reader : readers)
        if (box.read[reader] < box.sent) return false;
      return true;
    });
    if (!free) return false;
    box.call = call;
    if (data) std::memcpy(box.data, data, bytes);
    box.sent += 1;
    tell();
    return true;
  }

  bool read(Box& box, int writer, const Call& call, const std::function<void(const char*)>& use) {
    if (!await({ranks[writer]}, group->news, [&] { return box.sent > box.read[rank]; })) return false;
    bool same = box.call == call;
    if (same) use(box.data);
    box.read[rank] += 1;
    tell();
    if (!same) refuse("ranks differ in a call");
    return same;
  }

  std::vector<int> others() const {
    std::vector<int> result;
    for (int peer = 0; peer < size; ++peer)
      if (peer != rank) result.push_back(peer);
    return result;
  }

  // Shows all ranks' `bytes` to `use(rank, offset, data, length)`, in the order of ranks, in pieces. Ranks without
  // data show anything.
  RBLNRetCode exchange(const Call& call, const char* data,
                       const std::function<void(int, uint64_t, const char*, uint64_t)>& use) {
    note(Kind(call.kind));
    for (uint64_t offset = 0; offset < call.bytes; offset += CHUNK) {
      uint64_t length = std::min(CHUNK, call.bytes - offset);
      Box& own = group->boxes[rank][rank];
      if (!write(own, others(), call, data ? data + offset : nullptr, length)) return RBLNRetCode_FAILURE;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) {
          use(peer, offset, own.data, length);
          continue;
        }
        auto take = [&](const char* found) { use(peer, offset, found, length); };
        if (!read(group->boxes[peer][peer], peer, call, take)) return RBLNRetCode_FAILURE;
      }
    }
    return RBLNRetCode_SUCCESS;
  }

  // Reduces all ranks' float16 numbers in float32, in the order of ranks; `to` is null for a rank without result.
  RBLNRetCode reduce(const Call& call, const char* data, char* to) {
    std::vector<float> sums(CHUNK / 2);
    Op op = static_cast<Op>(call.op);
    return exchange(call, data, [&](int peer, uint64_t offset, const char* piece, uint64_t length) {
      for (uint64_t i = 0; to && i < length / 2; ++i) {
        uint16_t half;
        std::memcpy(&half, piece + 2 * i, 2);
        sums[i] = peer ? reduced(sums[i], from_half(half), op) : from_half(half);
        if (peer < size - 1) continue;
        half = to_half(op == Op::Avg ? sums[i] / size : sums[i]);
        std::memcpy(to + offset + 2 * i, &half, 2);
      }
    });
  }
};

}  // namespace rbln

namespace {

// Returns the host's address of device memory; null for other memory.
char* device_memory(const void* address, uint64_t bytes) {
  uint64_t host = 0, loan = 0;
  auto ret = rbln::rbln_v_borrow_host_ptr(reinterpret_cast<uint64_t>(address), bytes, host, loan);
  return ret == RBLNRetCode_SUCCESS ? reinterpret_cast<char*>(host) : nullptr;
}

// Returns the host's address of each of `chunks` pieces of device memory, which may be given as one.
std::vector<char*> pieces(const std::vector<void*>& given, int chunks, uint64_t bytes) {
  std::vector<char*> result;
  if (given.size() != 1 && int(given.size()) != chunks) return {};
  bool whole = given.size() == 1;
  char* first = device_memory(given[0], whole ? chunks * bytes : bytes);
  for (int i = 0; i < chunks; ++i) {
    char* piece = whole || !i ? first : device_memory(given[i], bytes);
    if (!piece) return {};
    result.push_back(whole ? piece + i * bytes : piece);
  }
  return result;
}

const char NOT_JOINED[] = "the group is not initialized", NO_MEMORY[] = "an address is not device memory";

}  // namespace

namespace rbln {

Rccl::Rccl() : member_(new Member) {}
Rccl::~Rccl() { delete member_; }

RBLNRetCode Rccl::PrepareContextAndExportMem(int) {
  member_->exported = true;
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode Rccl::GetUniqueIdForBroadcast(rccl_unique_id* id) {
  if (!member_->exported) return refuse("a unique id comes after PrepareContextAndExportMem");
  world_file = memfd_create("stub-rccl", MFD_CLOEXEC);
  if (world_file < 0 || ftruncate(world_file, sizeof(World))) return refuse("there is no shared memory");
  const char* root = std::getenv("RBLN_ROOT_IP");
  std::snprintf(id->root_ip, sizeof id->root_ip, "%s", root ? root : "");
  id->root_port = getpid();
  id->rdma_base_port = world_file;
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode Rccl::InitWithUniqueId(int rank, int size, int, const std::vector<int>& ranks, int,
                                   const rccl_unique_id* id) {
  if (!member_->exported || !id || !ranks.empty()) return refuse("only an exported default group has a unique id");
  if (!environment_says("LOCAL_RANK", rank) || !environment_says("WORLD_SIZE", size))
    return refuse("LOCAL_RANK and WORLD_SIZE must be the rank and the size of the default group");
  const char* root = std::getenv("RBLN_ROOT_IP");
  if (!root || std::string(root) != id->root_ip)
    return refuse(std::string("rank 0 is at ") + id->root_ip + ", and RBLN_ROOT_IP is " + (root ? root : "unset"));
  if (size > RANKS) return refuse("the stub joins at most 8 ranks");
  if (rank) {
    auto path = "/proc/" + std::to_string(id->root_port) + "/fd/" + std::to_string(id->rdma_base_port);
    world_file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  }
  struct flock lock = byte_of(rank, F_WRLCK);
  if (world_file < 0 || !(world = map_world(world_file)) || fcntl(world_file, F_SETLK, &lock))
    return refuse("rank 0 or this rank's place is gone");
  member_->rank = rank;
  member_->size = size;
  for (int each = 0; each < size; ++each) member_->ranks.push_back(each);
  member_->group = &world->groups[0];
  world->joined[rank] = 1;
  member_->tell();
  bool met = member_->await(member_->ranks, member_->group->news, [&] {
    for (int each : member_->ranks)
      if (!world->joined[each]) return false;
    return true;
  });
  return met ? RBLNRetCode_SUCCESS : RBLNRetCode_FAILURE;
}

RBLNRetCode Rccl::Init(int rank, int size, int group, const std::vector<int>& ranks, int) {
  if (ranks.empty()) return refuse("the stub's default group needs RCCL_PORT_GEN=1");
  if (!world) return refuse("a group needs the default group");
  if (size != int(ranks.size()) || rank < 0 || rank >= size) return refuse("rank and size contradict the ranks");
  uint64_t name = 1 + group;
  for (int each : ranks) name = name * 31 + each + 1;
  for (int slot = 1; slot < GROUPS; ++slot) {
    uint64_t found = 0;
    if (!world->groups[slot].name.compare_exchange_strong(found, name) && found != name) continue;
    member_->rank = rank;
    member_->size = size;
    member_->ranks = ranks;
    member_->group = &world->groups[slot];
    return RBLNRetCode_SUCCESS;
  }
  return refuse("the stub has at most 32 groups");
}

RBLNRetCode Rccl::Send(void* from, int count, Type type, int peer, rccl_extra_args*) {
  Member& me = *member_;
  uint64_t bytes = count * size_of(type);
  char* data = device_memory(from, bytes);
  if (!me.group) return refuse(NOT_JOINED);
  if (!data) return refuse(NO_MEMORY);
  if (peer == me.rank || peer < 0 || peer >= me.size) return refuse("a message needs another rank");
  Call call = {SEND, int(type), 0, peer, bytes};
  note(SEND);
  for (uint64_t offset = 0; offset < bytes; offset += CHUNK) {
    Box& box = me.group->boxes[me.rank][peer];
    if (!me.write(box, {peer}, call, data + offset, std::min(CHUNK, bytes - offset))) return RBLNRetCode_FAILURE;
  }
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode Rccl::Recv(void* to, int count, Type type, int peer, rccl_extra_args*) {
  Member& me = *member_;
  uint64_t bytes = count * size_of(type);
  char* target = device_memory(to, bytes);
  if (!me.group) return refuse(NOT_JOINED);
  if (!target) return refuse(NO_MEMORY);
  if (peer == me.rank || peer < 0 || peer >= me.size) return refuse("a message needs another rank");
  Call call = {SEND, int(type), 0, me.rank, bytes};
  note(SEND);
  for (uint64_t offset = 0; offset < bytes; offset += CHUNK) {
    auto take = [&](const char* data) { std::memcpy(target + offset, data, std::min(CHUNK, bytes - offset)); };
    if (!me.read(me.group->boxes[peer][me.rank], peer, call, take)) return RBLNRetCode_FAILURE;
  }
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode Rccl::Broadcast(void* from, void* to, int count, Type type, int root, rccl_extra_args*) {
  Member& me = *member_;
  uint64_t bytes = count * size_of(type);
  if (!me.group) return refuse(NOT_JOINED);
  char* target = device_memory(to, bytes);
  char* data = me.rank == root ? device_memory(from, bytes) : target;
  if (!target || !data) return refuse(NO_MEMORY);
  return me.exchange({BROADCAST, int(type), 0, root, bytes}, data,
                     [&](int peer, uint64_t offset, const char* piece, uint64_t length) {
                       if (peer == root) std::memcpy(target + offset, piece, length);
                     });
}

RBLNRetCode Rccl::AllGather(void* from, const std::vector<void*>& to, int count, Type type, int root,
                            rccl_extra_args*) {
  Member& me = *member_;
  uint64_t bytes = count * size_of(type);
  if (!me.group) return refuse(NOT_JOINED);
  if (bytes % GATHER_ALIGNMENT) return refuse("an all-gather takes multiples of 128 bytes");
  if (bytes * me.size > MAX_GATHER) return refuse("an all-gather returns at most 1 GiB");
  if (to.size() > 1 && CheckChunksDeviceAddrsContiguous(to, count, type, "all-gather")) return RBLNRetCode_INVALID;
  char* data = device_memory(from, bytes);
  std::vector<char*> targets = pieces(to, me.size, bytes);
  if (!data || targets.empty()) return refuse(NO_MEMORY);
  return me.exchange({ALL_GATHER, int(type), 0, root, bytes}, data,
                     [&](int peer, uint64_t offset, const char* piece, uint64_t length) {
                       std::memcpy(targets[peer] + offset, piece, length);
                     });
}

RBLNRetCode Rccl::AllReduce(void* from, void* to, int count, Type type, Op op, int root, rccl_extra_args*) {
  Member& me = *member_;
  uint64_t bytes = count * size_of(type);
  if (!me.group) return refuse(NOT_JOINED);
  if (type != Type::CustomFloat16 || op == Op::Mul) return refuse("only float16 is reduced, by sum, max, min or avg");
  if (bytes % UNIT) return refuse("an all-reduce takes multiples of 512 bytes");
  if (bytes > MAX_REDUCE * me.size) return refuse("an all-reduce takes at most 1 MiB per rank");
  char *data = device_memory(from, bytes), *target = device_memory(to, bytes);
  if (!data || !target) return refuse(NO_MEMORY);
  return me.reduce({ALL_REDUCE, int(type), int(op), root, bytes}, data, target);
}

RBLNRetCode Rccl::Scatter(const std::vector<void*>& from, void* to, int count, Type type, int root,
                          rccl_extra_args*) {
  Member& me = *member_;
  uint64_t bytes = count * size_of(type);
  if (!me.group) return refuse(NOT_JOINED);
  char* target = device_memory(to, bytes);
  std::vector<char*> sources(me.size);
  if (me.rank == root) sources = pieces(from, me.size, bytes);
  if (!target || sources.empty()) return refuse(NO_MEMORY);
  for (int chunk = 0; chunk < me.size; ++chunk) {
    auto take = [&](int peer, uint64_t offset, const char* piece, uint64_t length) {
      if (peer == root && chunk == me.rank) std::memcpy(target + offset, piece, length);
    };
    RBLNRetCode done = me.exchange({SCATTER, int(type), 0, root, bytes}, sources[chunk], take);
    if (done) return done;
  }
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode Rccl::ReduceScatter(const std::vector<void*>& from, void* to, int count, Type type, Op op, int root,
                                rccl_extra_args*) {
  Member& me = *member_;
  uint64_t bytes = count * size_of(type);
  if (!me.group) return refuse(NOT_JOINED);
  if (type != Type::CustomFloat16 || op == Op::Mul) return refuse("only float16 is reduced, by sum, max, min or avg");
  if (bytes * me.size * me.size > MAX_REDUCE_SCATTER) return refuse("a reduce-scatter takes at most 32 MiB");
  char* target = device_memory(to, bytes);
  std::vector<char*> sources = pieces(from, me.size, bytes);
  if (!target || sources.empty()) return refuse(NO_MEMORY);
  for (int chunk = 0; chunk < me.size; ++chunk) {
    Call call = {REDUCE_SCATTER, int(type), int(op), root, bytes};
    RBLNRetCode done = me.reduce(call, sources[chunk], chunk == me.rank ? target : nullptr);
    if (done) return done;
  }
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode Rccl::CheckChunksDeviceAddrsContiguous(const std::vector<void*>& chunks, int count, Type type,
                                                   const char*) {
  uint64_t bytes = count * size_of(type);
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (!device_memory(chunks[i], bytes)) return RBLNRetCode_INVALID;
    if (i && static_cast<char*>(chunks[i]) != static_cast<char*>(chunks[i - 1]) + bytes) return RBLNRetCode_INVALID;
  }
  return RBLNRetCode_SUCCESS;
}

}  // namespace rbln
