// Products with packed weights, norms, gates and rotary positions, each in pieces that any thread may
// compute.
#pragma once

#include "program.h"

namespace triptych {

// ---- linear: at = {x, packed, bias or null, out, packed weights of the next product or null};
//      n = {rows, columns, k, x stride, out is float}

inline int64_t panels_of(const Op& op) { return (op.n[1] + kPanel - 1) / kPanel; }
// Pieces are small, so that threads do not wait long for the last piece.
inline int64_t panels_a_piece(const Op& op) { return std::max<int64_t>(1, panels_of(op) / 32); }

inline int64_t linear_pieces(const Op& op) {
  const int64_t each = panels_a_piece(op);
  return (panels_of(op) + each - 1) / each;
}

// Adds the bias and writes the products of some rows with one panel.
template <int rows>
inline void write_tile(const Op& op, int64_t row, int64_t panel, const __m512 (&sums)[rows][2]) {
  const int64_t columns = op.n[1], column = panel * kPanel;
  const bf16* bias = static_cast<const bf16*>(op.at[2]);
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const int64_t at = column + half * kLanes;
    if (at >= columns) break;
    const __mmask16 mask = first(columns - at);
    const __m512 added = bias ? load(bias + at, mask) : _mm512_setzero_ps();
    for (int r = 0; r < rows; r++) {
      const __m512 sum = _mm512_add_ps(sums[r][half], added);
      const int64_t to = (row + r) * columns + at;
      if (!op.n[4]) {
        store(static_cast<bf16*>(op.at[3]) + to, sum, mask);
        continue;
      }
      // Logits exceed the caches, so whole lines bypass them.
      float* wide = static_cast<float*>(op.at[3]) + to;
      if (mask == 0xFFFF && reinterpret_cast<uintptr_t>(wide) % 64 == 0)
        _mm512_stream_ps(wide, sum);
      else
        _mm512_mask_storeu_ps(wide, mask, sum);
    }
  }
}

template <int rows, int lines>
inline void linear_tile(const Op& op, int64_t row, int64_t panel, const char* fetch) {
  const int64_t k = op.n[2], stride = op.n[3];
  const bf16* x = static_cast<const bf16*>(op.at[0]) + row * stride;
  const bf16* packed = static_cast<const bf16*>(op.at[1]) + panel * kPanel * k;
  __m512 sums[rows][2];
  for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
  multiply<rows, lines>(sums, x, stride, packed, 2 * kPanel, k / 2, fetch);
  write_tile<rows>(op, row, panel, sums);
}

// The panel that a thread will probably compute after this one; other threads take those between.
inline const char* next_panel(const Op& op, int64_t bytes, int64_t panel, int64_t each, int threads) {
  const int64_t panels = panels_of(op);
  const int64_t next = (panel + 1) % each ? panel + 1 : panel + 1 + each * (threads - 1);
  if (next < panels) return static_cast<const char*>(op.at[1]) + next * bytes;
  return op.at[4] ? static_cast<const char*>(op.at[4]) + (next - panels) * bytes : nullptr;
}

// Computes the panels of a piece for `rows` rows from `row` on, block of rows by block of rows. `tile` takes the
// number of rows and the number of lines to prefetch a step, known to the compiler, and the first row, the panel and
// the address to prefetch.
//   bytes: of a panel.
template <class Tile>
inline void by_tile(const Op& op, int64_t piece, int64_t row, int64_t rows, int threads, int64_t bytes,
                    const Tile& tile) {
  const int64_t each = panels_a_piece(op);
  const int64_t last = std::min(panels_of(op), (piece + 1) * each);
  for (int64_t panel = piece * each; panel < last; panel++) {
    const char* fetch = next_panel(op, bytes, panel, each, threads);
    by_block(rows, [&](int64_t block, int64_t from, auto count) {
      // A single block prefetches the whole next panel; of several blocks, the first two prefetch a half each.
      if (!fetch || block > 1)
        tile(count, std::integral_constant<int, 0>{}, row + from, panel, nullptr);
      else if (rows <= kRows)
        tile(count, std::integral_constant<int, 2>{}, row + from, panel, fetch);
      else
        tile(count, std::integral_constant<int, 1>{}, row + from, panel, fetch + block * bytes / 2);
    });
  }
}

inline void linear(const Op& op, int64_t piece, int threads) {
  const int64_t bytes = op.n[2] * kPanel * static_cast<int64_t>(sizeof(bf16));
  by_tile(op, piece, 0, op.n[0], threads, bytes,
          [&](auto rows, auto lines, int64_t row, int64_t panel, const char* fetch) {
            linear_tile<rows, lines>(op, row, panel, fetch);
          });
  if (op.n[4]) _mm_sfence();
}

// ---- norms: at = {x, weight, out or residual};
//      n = {outer, inner, size, outer stride, inner stride, weight is float}; f = {epsilon}

constexpr int64_t kRowsAPiece = 8;

inline int64_t norm_pieces(const Op& op) { return (op.n[0] * op.n[1] + kRowsAPiece - 1) / kRowsAPiece; }

inline __m512 norm_weight(const Op& op, int64_t at, __mmask16 mask) {
  if (op.n[5]) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(op.at[1]) + at);
  return load(static_cast<const bf16*>(op.at[1]) + at, mask);
}

inline void normalize(const Op& op, const bf16* from, bf16* to) {
  const int64_t size = op.n[2];
  __m512 squares = _mm512_setzero_ps();
  for (int64_t at = 0; at < size; at += kLanes) {
    const __m512 x = load(from + at, first(size - at));
    squares = _mm512_fmadd_ps(x, x, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(size);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + static_cast<float>(op.f[0])));
  for (int64_t at = 0; at < size; at += kLanes) {
    const __mmask16 mask = first(size - at);
    const __m512 x = _mm512_mul_ps(load(from + at, mask), scale);
    store(to + at, _mm512_mul_ps(x, norm_weight(op, at, mask)), mask);
  }
}

inline void norm(const Op& op, int64_t piece) {
  const int64_t last = std::min(op.n[0] * op.n[1], (piece + 1) * kRowsAPiece);
  for (int64_t row = piece * kRowsAPiece; row < last; row++) {
    const int64_t at = row / op.n[1] * op.n[3] + row % op.n[1] * op.n[4];
    normalize(op, static_cast<const bf16*>(op.at[0]) + at, static_cast<bf16*>(op.at[2]) + row * op.n[2]);
  }
}

// Replaces the residual by the rounded sum, and x by the normalized sum.
inline void add_norm(const Op& op, int64_t piece) {
  const int64_t size = op.n[2], last = std::min(op.n[0], (piece + 1) * kRowsAPiece);
  for (int64_t row = piece * kRowsAPiece; row < last; row++) {
    bf16* x = static_cast<bf16*>(op.at[0]) + row * size;
    bf16* residual = static_cast<bf16*>(op.at[2]) + row * size;
    for (int64_t at = 0; at < size; at += kLanes) {
      const __mmask16 mask = first(size - at);
      store(residual + at, _mm512_add_ps(load(x + at, mask), load(residual + at, mask)), mask);
    }
    normalize(op, residual, x);
  }
}

// ---- gate: at = {x, out}; n = {rows, size, x stride, activation}: out = activation(x[:size]) * x[size:];
//      activation: 0 SiLU, 1 GELU by tanh

constexpr int64_t kGatesAPiece = 8192;

inline int64_t gate_rows(const Op& op) { return std::max<int64_t>(1, kGatesAPiece / op.n[1]); }

inline int64_t gate_pieces(const Op& op) { return (op.n[0] + gate_rows(op) - 1) / gate_rows(op); }

inline __m512 gated(__m512 x, bool gelu) {
  if (!gelu) return _mm512_mul_ps(x, sigmoid(x));
  // tanh(u) = 2 sigmoid(2 u) - 1, so x (1 + tanh(u)) / 2 = x sigmoid(2 u).
  const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const __m512 u = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
  return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(u, _mm512_set1_ps(2 * 0.7978845608028654f))));
}

inline void gate(const Op& op, int64_t piece) {
  const int64_t size = op.n[1], last = std::min(op.n[0], (piece + 1) * gate_rows(op));
  for (int64_t row = piece * gate_rows(op); row < last; row++) {
    const bf16* x = static_cast<const bf16*>(op.at[0]) + row * op.n[2];
    bf16* out = static_cast<bf16*>(op.at[1]) + row * size;
    for (int64_t at = 0; at < size; at += kLanes) {
      const __mmask16 mask = first(size - at);
      store(out + at, _mm512_mul_ps(gated(load(x + at, mask), op.n[3]), load(x + size + at, mask)), mask);
    }
  }
}

// ---- copy: at = {from, to}; n = {bytes}

constexpr int64_t kBytesAPiece = 1 << 15;

inline int64_t copy_pieces(const Op& op) { return (op.n[0] + kBytesAPiece - 1) / kBytesAPiece; }

inline void copy(const Op& op, int64_t piece) {
  const int64_t at = piece * kBytesAPiece, bytes = std::min(kBytesAPiece, op.n[0] - at);
  std::memcpy(static_cast<char*>(op.at[1]) + at, static_cast<const char*>(op.at[0]) + at, bytes);
}

// ---- rotate: at = {positions, queries, keys or null, cosines and sines};
//      n = {tokens, query heads, key heads, head size, rotated, query stride, key stride}:
//      rotates the two halves of the first `rotated` values of each head

constexpr int64_t kTokensAPiece = 8;

inline int64_t rotate_pieces(const Op& op) { return (op.n[0] + kTokensAPiece - 1) / kTokensAPiece; }

inline void rotate_heads(bf16* heads, int64_t count, int64_t head_size, const bf16* turn, int64_t half) {
  for (int64_t at = 0; at < half; at += kLanes) {
    const __mmask16 mask = first(half - at);
    const __m512 cosine = load(turn + at, mask), sine = load(turn + half + at, mask);
    for (int64_t head = 0; head < count; head++) {
      bf16* left = heads + head * head_size + at;
      const __m512 x = load(left, mask), y = load(left + half, mask);
      store(left, _mm512_fmsub_ps(x, cosine, _mm512_mul_ps(y, sine)), mask);
      store(left + half, _mm512_fmadd_ps(y, cosine, _mm512_mul_ps(x, sine)), mask);
    }
  }
}

inline void rotate(const Op& op, int64_t piece) {
  const int64_t last = std::min(op.n[0], (piece + 1) * kTokensAPiece);
  for (int64_t token = piece * kTokensAPiece; token < last; token++) {
    const int64_t position = static_cast<const int64_t*>(op.at[0])[token];
    const bf16* turn = static_cast<const bf16*>(op.at[3]) + position * op.n[4];
    rotate_heads(static_cast<bf16*>(op.at[1]) + token * op.n[5], op.n[1], op.n[3], turn, op.n[4] / 2);
    if (op.at[2])
      rotate_heads(static_cast<bf16*>(op.at[2]) + token * op.n[6], op.n[2], op.n[3], turn, op.n[4] / 2);
  }
}

}  // namespace triptych
