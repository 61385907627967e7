// Runs programs: all threads walk the same list and take pieces of each operation dynamically.
//
// An operation ends when all of its pieces are done, not when every thread has reached it. A thread that was
// descheduled meanwhile moves on to the next operation, and no other thread waits for it. Two operations that
// run beside each other end together.

#include <sched.h>

#include <memory>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "encoders.h"
#include "layers.h"
#include "quantized.h"

namespace triptych {
namespace {

struct alignas(64) Progress {
  std::atomic<int64_t> taken{0};
  std::atomic<int64_t> done{0};
};

int64_t pieces_of(const Op& op, const Plan* const* plans) {
  switch (op.kind) {
    case kLinear: return linear_pieces(op);
    case kQuantized: return linear_pieces(op);
    case kNorm: return norm_pieces(op);
    case kAddNorm: return norm_pieces(op);
    case kGate: return gate_pieces(op);
    case kRotate: return rotate_pieces(op);
    case kWriteCache: return write_pieces(*plans[op.plan]);
    case kAttend: return attend_pieces(op, *plans[op.plan]);
    case kShrink: return shrink_pieces(op);
    case kExpand: return expand_pieces(op);
    case kFloatLinear: return float_linear_pieces(op);
    case kLayerNorm: return layer_norm_pieces(op);
    case kAdd: return value_pieces(op);
    case kGelu: return value_pieces(op);
    case kAttendTexts: return attend_texts_pieces(op, *plans[op.plan]);
    case kCopy: return copy_pieces(op);
  }
  return 0;
}

void run_piece(const Op& op, const Plan* const* plans, Scratch& scratch, int64_t piece) {
  switch (op.kind) {
    case kLinear: return linear(op, piece, scratch.threads);
    case kQuantized: return quantized(op, piece, scratch.threads);
    case kNorm: return norm(op, piece);
    case kAddNorm: return add_norm(op, piece);
    case kGate: return gate(op, piece);
    case kRotate: return rotate(op, piece);
    case kWriteCache: return write_cache(op, *plans[op.plan], piece);
    case kAttend: return attend(op, *plans[op.plan], scratch, piece);
    case kShrink: return shrink(op, piece);
    case kExpand: return expand(op, piece);
    case kFloatLinear: return float_linear(op, piece, scratch.threads);
    case kLayerNorm: return layer_norm(op, piece);
    case kAdd: return add(op, piece);
    case kGelu: return gelu(op, piece);
    case kAttendTexts: return attend_texts(op, *plans[op.plan], piece);
    case kCopy: return copy(op, piece);
  }
}

// Waits for other threads' pieces, which take microseconds. If they take longer, their thread is descheduled,
// so yields to it.
class Patience {
 public:
  void wait() {
    if (++spins_ < 4096)
      _mm_pause();
    else
      sched_yield();
  }

 private:
  int spins_ = 0;
};

}  // namespace
}  // namespace triptych

using namespace triptych;

extern "C" {

// Packs weights [columns][k] into [ceil(columns / 32)][k / 2][32][2]; columns beyond the last are 0.
void triptych_pack(const bf16* weights, bf16* packed, int64_t columns, int64_t k, int threads) {
  const int64_t panels = (columns + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(threads)
  for (int64_t panel = 0; panel < panels; panel++)
    for (int64_t column = 0; column < kPanel; column++) {
      const int64_t from = panel * kPanel + column;
      for (int64_t pair = 0; pair < k / 2; pair++) {
        bf16* to = packed + (panel * (k / 2) + pair) * 2 * kPanel + 2 * column;
        to[0] = from < columns ? weights[from * k + 2 * pair] : 0;
        to[1] = from < columns ? weights[from * k + 2 * pair + 1] : 0;
      }
    }
}

// Packs codes [columns][k] and their scales [columns][k / group] in the order in which products read them.
void triptych_pack_codes(const uint8_t* codes, const uint16_t* scales, char* packed, int64_t columns, int64_t k,
                         int64_t group, int64_t bits, int threads) {
  const int64_t panels = (columns + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(threads)
  for (int64_t panel = 0; panel < panels; panel++) {
    const int64_t from = panel * kPanel;
    pack_codes(codes + from * k, scales + from * (k / group), packed + panel * (k / group) * group_bytes(group, bits),
               std::min<int64_t>(kPanel, columns - from), k, group, bits);
  }
}

// Computes the derived numbers of a plan.
void triptych_prepare(Plan* plan) {
  plan->longest_query = plan->longest = 1;
  for (int64_t row = 0; row < plan->rows; row++) {
    plan->longest = std::max<int64_t>(plan->longest, plan->seq_lens[row]);
    const int64_t query = plan->query_start[row + 1] - plan->query_start[row];
    plan->longest_query = std::max(plan->longest_query, query);
  }
}

// Bytes that a run needs to track the progress of `count` operations. triptych_run() initializes them.
int64_t triptych_progress_bytes(int64_t count) { return count * static_cast<int64_t>(sizeof(Progress)); }

// Runs operations in order. A process may run only one program at a time.
void triptych_run(const Op* ops, int64_t count, const Plan* const* plans, void* memory, int threads) {
  static std::vector<float> partial;
  static std::vector<std::atomic<int32_t>> parts;
  int64_t floats = 0, pairs = 0;
  for (int64_t i = 0; i < count; i++)
    if (ops[i].kind == kAttend && plans[ops[i].plan]->longest_query == 1) {
      const Plan& plan = *plans[ops[i].plan];
      pairs = std::max(pairs, plan.rows * ops[i].n[0]);
      floats = std::max(floats, plan.rows * ops[i].n[0] * parts_of(plan) * ops[i].n[1] * (ops[i].n[2] + 2));
    }
  if (static_cast<int64_t>(partial.size()) < floats) partial.resize(floats);
  if (static_cast<int64_t>(parts.size()) < pairs) parts = std::vector<std::atomic<int32_t>>(pairs);
  Scratch scratch{threads, partial.data(), parts.data()};
  Progress* progress = static_cast<Progress*>(memory);
  for (int64_t i = 0; i < count; i++) new (progress + i) Progress;
#pragma omp parallel num_threads(threads)
  for (int64_t i = 0, ended = 0; i < count; i++) {
    const int64_t pieces = pieces_of(ops[i], plans);
    for (;;) {
      const int64_t piece = progress[i].taken.fetch_add(1, std::memory_order_relaxed);
      if (piece >= pieces) break;
      run_piece(ops[i], plans, scratch, piece);
      progress[i].done.fetch_add(1, std::memory_order_release);
    }
    if (ops[i].beside) continue;
    for (; ended <= i; ended++) {
      const int64_t needed = pieces_of(ops[ended], plans);
      for (Patience patience; progress[ended].done.load(std::memory_order_acquire) < needed;) patience.wait();
    }
  }
}

}  // extern "C"
