// Paged attention over a cache with a layout for matrix products.
//
// A layer's cache is [blocks][kv heads][2][block size][head size]. The first half of a head's block holds
// keys as panels, [block size / 32][head size / 2][32 keys][2], so scores are products like any other. The
// second half holds values by pairs of keys, [block size / 2][head size][2], so weighted sums of values are
// products too.
//
// A token's result has the same bits in a decode step and in chunks that begin anywhere. Its keys are summed by
// tiles and parts whose bounds are absolute positions, and parts are merged in their order. Keys that it does not
// see add zeros.
#pragma once

#include "program.h"

namespace triptych {

// ---- write: at = {key, value, cache, out}; n = {kv heads, head size, key stride, value stride, out stride}

constexpr int64_t kWritesAPiece = 8;

inline int64_t write_pieces(const Plan& plan) { return (plan.total_tokens + kWritesAPiece - 1) / kWritesAPiece; }

inline void write_cache(const Op& op, const Plan& plan, int64_t piece) {
  const int64_t heads = op.n[0], size = op.n[1], block_size = plan.block_size;
  const int64_t last = std::min(plan.total_tokens, (piece + 1) * kWritesAPiece);
  for (int64_t token = piece * kWritesAPiece; token < last; token++) {
    // Padding gets zeros as its result and writes nothing to the cache.
    if (token >= plan.num_tokens) {
      std::memset(static_cast<bf16*>(op.at[3]) + token * op.n[4], 0, op.n[4] * sizeof(bf16));
      continue;
    }
    const int64_t slot = plan.slot_mapping[token], offset = slot % block_size;
    for (int64_t head = 0; head < heads && op.at[0]; head++) {
      const bf16* key = static_cast<const bf16*>(op.at[0]) + token * op.n[2] + head * size;
      const bf16* value = static_cast<const bf16*>(op.at[1]) + token * op.n[3] + head * size;
      bf16* block = static_cast<bf16*>(op.at[2]) + (slot / block_size * heads + head) * 2 * block_size * size;
      bf16* keys = block + offset / kPanel * kPanel * size + offset % kPanel * 2;
      for (int64_t pair = 0; pair < size / 2; pair++) std::memcpy(keys + pair * 2 * kPanel, key + 2 * pair, 4);
      bf16* values = block + block_size * size + offset / 2 * 2 * size + offset % 2;
      for (int64_t at = 0; at < size; at++) values[2 * at] = value[at];
    }
  }
}

// ---- attend: at = {query, cache, out, sinks or null};
//      n = {kv heads, query heads a kv head, head size, window, query stride}; f = {scale, soft cap}

constexpr int kMostRows = 48;
constexpr int kTile = 128;
constexpr int kMostHead = 256;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline int64_t queries_a_piece(const Op& op) { return std::max<int64_t>(1, kMostRows / op.n[1]); }

inline int64_t attend_pieces(const Op& op, const Plan& plan) {
  if (plan.longest_query == 1) return plan.rows * op.n[0] * parts_of(plan);
  const int64_t each = queries_a_piece(op);
  return plan.rows * op.n[0] * ((plan.longest_query + each - 1) / each);
}

// Running results of some rows: weighted sums of values [rows][head], and each row's largest score and sum of
// weights.
struct Seen {
  alignas(64) float sums[kMostRows * kMostHead];
  float most[kMostRows];
  float weight[kMostRows];
};

struct View {
  const bf16* cache;
  const int32_t* table;
  int64_t block_size, kv_heads, head, size;

  const bf16* block(int64_t key) const {
    return cache + (table[key / block_size] * kv_heads + head) * 2 * block_size * size;
  }
  const bf16* keys(int64_t key) const { return block(key) + key % block_size / kPanel * kPanel * size; }
  const bf16* values(int64_t key) const { return block(key) + block_size * size + key % block_size / 2 * 2 * size; }
};

// Adds `pairs` pairs of values, weighted, to some rows' sums. Prefetches the keys at `later` if it is not
// null.
inline void add_values(float* sums, int rows, const bf16* weights, const bf16* values, int64_t size, int64_t pairs,
                       const bf16* later) {
  for (int from = 0; from < rows; from += kRows) {
    with_rows(std::min(kRows, rows - from), [&](auto count) {
      constexpr int n = count;
      for (int64_t column = 0; column < size; column += kPanel) {
        __m512 held[n][2];
        float* to = sums + from * size + column;
        for (int row = 0; row < n; row++)
          for (int half = 0; half < 2; half++) held[row][half] = _mm512_loadu_ps(to + row * size + half * kLanes);
        if (later && !from)
          multiply<n, 2>(held, weights, kTile, values + 2 * column, 2 * size, pairs,
                         reinterpret_cast<const char*>(later + 2 * column * pairs));
        else
          multiply<n, 0>(held, weights + from * kTile, kTile, values + 2 * column, 2 * size, pairs, nullptr);
        for (int row = 0; row < n; row++)
          for (int half = 0; half < 2; half++) _mm512_storeu_ps(to + row * size + half * kLanes, held[row][half]);
      }
    });
  }
}

// Attends some rows over the keys [begin, end). Row r is at position `position + r / group`. It sees the keys
// up to its own, or the last `window` of them if that is not 0. `begin` is a multiple of kPanel or the first
// key that any row sees. `after` is the address that the thread reads next, for prefetching.
// Tiles end at multiples of kTile, wherever the first one begins.
inline void look(const Op& op, const View& view, const bf16* queries, int rows, int64_t position, int64_t begin,
                 int64_t end, Seen& seen, const bf16* after) {
  const int64_t group = op.n[1], size = op.n[2], window = op.n[3];
  const float scale = static_cast<float>(op.f[0]), cap = static_cast<float>(op.f[1]);
  alignas(64) float scores[kMostRows * kTile];
  alignas(64) bf16 weights[kMostRows * kTile];
  alignas(64) bf16 pair[2 * kMostHead];
  std::fill_n(seen.sums, rows * size, 0.0f);
  std::fill_n(seen.most, rows, kNothing);
  std::fill_n(seen.weight, rows, 0.0f);
  for (int64_t tile = begin / kPanel * kPanel; tile < end; tile = (tile / kTile + 1) * kTile) {
    const int64_t stop = std::min((tile / kTile + 1) * kTile, end);
    const int width = static_cast<int>((stop - tile + kPanel - 1) / kPanel * kPanel);
    for (int at = 0; at < width; at += kPanel) {
      const bf16* keys = view.keys(tile + at);
      const char* values = reinterpret_cast<const char*>(view.values(tile + at));
      for (int from = 0; from < rows; from += kRows)
        with_rows(std::min(kRows, rows - from), [&](auto count) {
          constexpr int n = count;
          __m512 sums[n][2];
          for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
          multiply<n, (n < kRows ? 2 : 0)>(sums, queries + from * size, size, keys, 2 * kPanel, size / 2, values);
          for (int row = 0; row < n; row++)
            for (int half = 0; half < 2; half++)
              _mm512_store_ps(scores + (from + row) * kTile + at + half * kLanes, sums[row][half]);
        });
    }
    for (int row = 0; row < rows; row++) {
      const int64_t own = position + row / group;
      const int64_t low = std::max(begin, window ? own - window + 1 : 0), high = std::min(end - 1, own);
      float* mine = scores + row * kTile;
      __m512 most = _mm512_set1_ps(kNothing);
      for (int at = 0; at < width; at += kLanes) {
        __m512 score = _mm512_mul_ps(_mm512_load_ps(mine + at), _mm512_set1_ps(scale));
        if (cap) {  // cap tanh(score / cap), and tanh(u) = 2 sigmoid(2 u) - 1
          const __m512 turned = sigmoid(_mm512_mul_ps(score, _mm512_set1_ps(2 / cap)));
          score = _mm512_fmsub_ps(turned, _mm512_set1_ps(2 * cap), _mm512_set1_ps(cap));
        }
        const int64_t from = low - tile - at, to = high - tile - at + 1;
        const __mmask16 before = from <= 0 ? 0 : first(from), until = to <= 0 ? 0 : first(to);
        score = _mm512_mask_mov_ps(_mm512_set1_ps(kNothing), until & ~before, score);
        _mm512_store_ps(mine + at, score);
        most = _mm512_max_ps(most, score);
      }
      const float largest = std::max(seen.most[row], _mm512_reduce_max_ps(most));
      bf16* weight = weights + row * kTile;
      if (largest == kNothing) {
        std::fill_n(weight, width, 0);
        continue;
      }
      __m512 total = _mm512_setzero_ps();
      for (int at = 0; at < width; at += kLanes) {
        const __m512 each = exponential(_mm512_sub_ps(_mm512_load_ps(mine + at), _mm512_set1_ps(largest)));
        total = _mm512_add_ps(total, each);
        store(weight + at, each);
      }
      const float kept = exponential(seen.most[row] - largest);
      seen.weight[row] = std::fma(seen.weight[row], kept, _mm512_reduce_add_ps(total));
      seen.most[row] = largest;
      if (kept != 1.0f)
        for (int64_t at = 0; at < size; at += kLanes) {
          float* sums = seen.sums + row * size + at;
          _mm512_storeu_ps(sums, _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(kept)));
        }
    }
    // Unseen values may be NaN, and 0 times NaN is NaN. They are skipped, or zeroed if they share a pair with
    // a seen value.
    for (int64_t from = std::max(tile, begin); from < stop;) {
      const int64_t to = std::min(stop, (from / kPanel + 1) * kPanel);
      const bf16* of = weights + (from - tile) / 2 * 2;
      if (from % 2 || to - from == 1) {
        const bf16* both = view.values(from);
        const bool second = from % 2, alone = second || from + 1 >= stop;
        for (int64_t at = 0; at < size; at++) {
          pair[2 * at] = second ? 0 : both[2 * at];
          pair[2 * at + 1] = alone && !second ? 0 : both[2 * at + 1];
        }
        add_values(seen.sums, rows, of, pair, size, 1, nullptr);
        from++;
        continue;
      }
      const int64_t pairs = (to - from) / 2, panel = from / kPanel * kPanel;
      const bf16* later = panel + kTile < end ? view.keys(panel + kTile) : after ? after + (panel - tile) * size : nullptr;
      add_values(seen.sums, rows, of, view.values(from), size, pairs, later);
      from += 2 * pairs;
    }
  }
}

// Adds a later part of a row's keys to its results. `std::fma` leaves no choice of rounding to the compiler.
inline void merge(float* sums, float& most, float& weight, const float* more, float more_most, float more_weight,
                  int64_t size) {
  if (more_most == kNothing) return;
  const float largest = std::max(most, more_most);
  const float kept = exponential(most - largest), added = exponential(more_most - largest);
  weight = std::fma(more_weight, added, weight * kept);
  most = largest;
  for (int64_t at = 0; at < size; at += kLanes) {
    const __m512 before = _mm512_mul_ps(_mm512_loadu_ps(sums + at), _mm512_set1_ps(kept));
    _mm512_storeu_ps(sums + at, _mm512_fmadd_ps(_mm512_loadu_ps(more + at), _mm512_set1_ps(added), before));
  }
}

inline void finish(const Op& op, int64_t head, float* sums, float most, float weight, bf16* out) {
  const int64_t size = op.n[2];
  float kept = 1.0f;
  if (const float* sinks = static_cast<const float*>(op.at[3])) {
    const float largest = std::max(most, sinks[head]);
    kept = exponential(most - largest);
    weight = std::fma(weight, kept, exponential(sinks[head] - largest));
  }
  const __m512 share = _mm512_set1_ps(weight > 0 ? kept / weight : 0.0f);
  for (int64_t at = 0; at < size; at += kLanes) store(out + at, _mm512_mul_ps(_mm512_loadu_ps(sums + at), share));
}

// One row's only token, one kv head, one part of the keys. The thread that finishes the last part combines
// them.
inline void attend_part(const Op& op, const Plan& plan, Scratch& scratch, int64_t piece) {
  const int64_t heads = op.n[0], group = op.n[1], size = op.n[2], window = op.n[3], parts = parts_of(plan);
  const int64_t part = piece % parts, head = piece / parts % heads, row = piece / parts / heads;
  const int64_t own = plan.seq_lens[row] - 1;
  const int64_t low = window ? std::max<int64_t>(0, own - window + 1) : 0;
  const int64_t first_part = low / kPart, last_part = own / kPart;
  if (part < first_part || part > last_part) return;
  const int64_t token = plan.query_start[row];
  const bf16* query = static_cast<const bf16*>(op.at[0]) + token * op.n[4] + head * group * size;
  const View view{static_cast<const bf16*>(op.at[1]), plan.block_table + row * plan.table_width, plan.block_size, heads,
                  head, size};
  // The keys that this thread will probably read next.
  const int64_t ahead = piece / parts + scratch.threads, next = ahead / heads;
  const bf16* after = nullptr;
  if (next < plan.rows && parts == 1)
    after = View{view.cache, plan.block_table + next * plan.table_width, plan.block_size, heads, ahead % heads, size}.keys(0);
  Seen seen;
  look(op, view, query, static_cast<int>(group), own, std::max(low, part * kPart),
       std::min(own + 1, (part + 1) * kPart), seen, after);
  bf16* out = static_cast<bf16*>(op.at[2]) + (token * heads + head) * group * size;
  if (first_part == last_part) {
    for (int64_t g = 0; g < group; g++)
      finish(op, head * group + g, seen.sums + g * size, seen.most[g], seen.weight[g], out + g * size);
    return;
  }
  const int64_t each = size + 2, pair = row * heads + head;
  float* all = scratch.partial + pair * parts * group * each;
  for (int64_t g = 0; g < group; g++) {
    float* mine = all + (part * group + g) * each;
    std::memcpy(mine, seen.sums + g * size, size * sizeof(float));
    mine[size] = seen.most[g];
    mine[size + 1] = seen.weight[g];
  }
  if (scratch.parts[pair].fetch_add(1, std::memory_order_acq_rel) != last_part - first_part) return;
  scratch.parts[pair].store(0, std::memory_order_relaxed);
  for (int64_t g = 0; g < group; g++) {
    float* sums = all + (first_part * group + g) * each;
    float most = sums[size], weight = sums[size + 1];
    for (int64_t p = first_part + 1; p <= last_part; p++) {
      const float* theirs = all + (p * group + g) * each;
      merge(sums, most, weight, theirs, theirs[size], theirs[size + 1], size);
    }
    finish(op, head * group + g, sums, most, weight, out + g * size);
  }
}

// Some of one row's tokens, one kv head, all keys that they see.
inline void attend_chunk(const Op& op, const Plan& plan, int64_t piece) {
  const int64_t heads = op.n[0], group = op.n[1], size = op.n[2], window = op.n[3], each = queries_a_piece(op);
  const int64_t blocks = (plan.longest_query + each - 1) / each;
  // The last tokens see the most keys and go first, so that no thread starts a long piece late.
  const int64_t block = blocks - 1 - piece / heads % blocks, head = piece % heads, row = piece / heads / blocks;
  const int64_t start = plan.query_start[row], count = plan.query_start[row + 1] - start;
  const int64_t from = block * each, tokens = std::min(each, count - from);
  if (tokens <= 0) return;
  alignas(64) bf16 queries[kMostRows * kMostHead];
  for (int64_t t = 0; t < tokens; t++)
    std::memcpy(queries + t * group * size,
                static_cast<const bf16*>(op.at[0]) + (start + from + t) * op.n[4] + head * group * size,
                group * size * sizeof(bf16));
  const int64_t position = plan.seq_lens[row] - count + from;
  const View view{static_cast<const bf16*>(op.at[1]), plan.block_table + row * plan.table_width, plan.block_size, heads,
                  head, size};
  const int64_t rows = tokens * group, low = window ? std::max<int64_t>(0, position - window + 1) : 0;
  const int64_t end = position + tokens;
  Seen seen, more;
  for (int64_t part = low / kPart; part * kPart < end; part++) {
    const bool is_first = part == low / kPart;
    Seen& found = is_first ? seen : more;
    look(op, view, queries, static_cast<int>(rows), position, std::max(low, part * kPart),
         std::min(end, (part + 1) * kPart), found, nullptr);
    for (int64_t r = 0; !is_first && r < rows; r++)
      merge(seen.sums + r * size, seen.most[r], seen.weight[r], more.sums + r * size, more.most[r], more.weight[r],
            size);
  }
  for (int64_t r = 0; r < rows; r++) {
    const int64_t g = r % group;
    bf16* out = static_cast<bf16*>(op.at[2]) + ((start + from + r / group) * heads + head) * group * size + g * size;
    finish(op, head * group + g, seen.sums + r * size, seen.most[r], seen.weight[r], out);
  }
}

inline void attend(const Op& op, const Plan& plan, Scratch& scratch, int64_t piece) {
  if (plan.longest_query == 1)
    attend_part(op, plan, scratch, piece);
  else
    attend_chunk(op, plan, piece);
}

}  // namespace triptych
