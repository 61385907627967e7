// Products with the matrices of each row's LoRA adapter. Rows of the base model cost nothing.
#pragma once

#include "program.h"

namespace triptych {

// Adjacent rows with the same adapter share the loads of its matrices.
constexpr int kAdapterRows = 4;
// Sums that run at the same time for a row: a single chain of additions would wait for each one's latency.
constexpr int kChains = 4;

// Calls `work` with each run of adjacent rows that have the same adapter, and that adapter.
template <class Work>
inline void with_adapters(const int32_t* slots, int64_t from, int64_t to, const Work& work) {
  while (from < to) {
    const int64_t slot = slots[from];
    int64_t end = from + 1;
    while (end < to && end - from < kAdapterRows && slots[end] == slot) end++;
    if (slot >= 0) work(from, static_cast<int>(end - from), slot);
    from = end;
  }
}

// Sums of `rows` rows times one panel of adjacent pairs, in `kChains` interleaved chains.
template <int rows>
inline void multiply_chained(__m512 (&sums)[rows][2], const bf16* x, int64_t stride, const bf16* panel,
                             int64_t pairs) {
  __m512 chains[kChains][rows][2];
  for (auto& chain : chains)
    for (auto& sum : chain) sum[0] = sum[1] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + kChains <= pairs; k += kChains)
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; chain++)
      multiply<rows, 0>(chains[chain], x + 2 * (k + chain), stride, panel + (k + chain) * 2 * kPanel, 2 * kPanel, 1,
                        nullptr);
  multiply<rows, 0>(chains[0], x + 2 * k, stride, panel + k * 2 * kPanel, 2 * kPanel, pairs - k, nullptr);
  for (int row = 0; row < rows; row++)
    for (int half = 0; half < 2; half++)
      sums[row][half] = _mm512_add_ps(_mm512_add_ps(chains[0][row][half], chains[1][row][half]),
                                      _mm512_add_ps(chains[2][row][half], chains[3][row][half]));
}

// ---- shrink: at = {x, packed A of all adapters, rows' adapters, out};
//      n = {rows, columns of an adapter, k, x stride}: out = A x, [rows][columns]

inline int64_t shrink_panels(const Op& op) { return (op.n[1] + kPanel - 1) / kPanel; }
inline int64_t shrink_pieces(const Op& op) {
  return shrink_panels(op) * ((op.n[0] + kAdapterRows - 1) / kAdapterRows);
}

inline void shrink(const Op& op, int64_t piece) {
  const int64_t panels = shrink_panels(op), columns = op.n[1], k = op.n[2], stride = op.n[3];
  const int64_t panel = piece % panels, from = piece / panels * kAdapterRows;
  const int64_t to = std::min<int64_t>(op.n[0], from + kAdapterRows);
  const int32_t* slots = static_cast<const int32_t*>(op.at[2]);
  with_adapters(slots, from, to, [&](int64_t first_row, int count, int64_t slot) {
    const bf16* x = static_cast<const bf16*>(op.at[0]) + first_row * stride;
    const bf16* packed = static_cast<const bf16*>(op.at[1]) + (slot * panels + panel) * kPanel * k;
    with_rows<kAdapterRows>(count, [&](auto rows) {
      __m512 sums[rows][2];
      multiply_chained<rows>(sums, x, stride, packed, k / 2);
      for (int half = 0; half < 2; half++) {
        const int64_t at = panel * kPanel + half * kLanes;
        if (at >= columns) break;
        for (int row = 0; row < rows; row++)
          store(static_cast<bf16*>(op.at[3]) + (first_row + row) * columns + at, sums[row][half],
                first(columns - at));
      }
    });
  });
}

// ---- expand: at = {out, shrunk, packed B of all adapters, rows' adapters};
//      n = {rows, out's columns, rank, parts, adapters' panels, the parts' ends among the columns ...}:
//      out[part] += B[part] shrunk[part]

constexpr int kMostParts = 4;

inline int64_t expand_panels_a_piece(const Op& op) { return std::max<int64_t>(1, op.n[4] / 16); }
inline int64_t expand_pieces(const Op& op) {
  const int64_t each = expand_panels_a_piece(op);
  return (op.n[4] + each - 1) / each;
}

inline void expand(const Op& op, int64_t piece) {
  const int64_t columns = op.n[1], rank = op.n[2], parts = op.n[3], panels = op.n[4];
  const int64_t each = expand_panels_a_piece(op), last = std::min(panels, (piece + 1) * each);
  const int64_t stride = parts * rank;
  const int32_t* slots = static_cast<const int32_t*>(op.at[3]);
  int64_t part = 0, first_panel = 0, begin = 0;
  for (int64_t panel = piece * each; panel < last; panel++) {
    // Each part begins with a panel of its own.
    while (panel >= first_panel + (op.n[5 + part] - begin + kPanel - 1) / kPanel) {
      first_panel += (op.n[5 + part] - begin + kPanel - 1) / kPanel;
      begin = op.n[5 + part++];
    }
    const int64_t column = begin + (panel - first_panel) * kPanel, end = op.n[5 + part];
    with_adapters(slots, 0, op.n[0], [&](int64_t first_row, int count, int64_t slot) {
      const bf16* x = static_cast<const bf16*>(op.at[1]) + first_row * stride + part * rank;
      const bf16* packed = static_cast<const bf16*>(op.at[2]) + (slot * panels + panel) * kPanel * rank;
      with_rows<kAdapterRows>(count, [&](auto rows) {
        __m512 sums[rows][2];
        for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
        multiply<rows, 0>(sums, x, stride, packed, 2 * kPanel, rank / 2, nullptr);
        for (int half = 0; half < 2; half++) {
          const int64_t at = column + half * kLanes;
          if (at >= end) break;
          for (int row = 0; row < rows; row++) {
            bf16* to = static_cast<bf16*>(op.at[0]) + (first_row + row) * columns + at;
            const __mmask16 mask = first(end - at);
            store(to, _mm512_add_ps(load(to, mask), sums[row][half]), mask);
          }
        }
      });
    });
  }
}

}  // namespace triptych
