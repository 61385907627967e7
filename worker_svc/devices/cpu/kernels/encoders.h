// Kernels for encoders: products in float32, and layer norms, GELU, sums and attention within texts, which compute
// in float32 on tensors in float32 or bfloat16.
#pragma once

#include "layers.h"

namespace triptych {

// Does the same as the function of that name for bfloat16, with a value a step instead of a pair.
template <int rows, int lines>
inline void multiply(__m512 (&sums)[rows][2], const float* __restrict x, int64_t x_stride,
                     const float* __restrict panel, int64_t stride, int64_t count, const char* fetch) {
  for (int64_t k = 0; k < count; k++) {
    const __m512 left = _mm512_loadu_ps(panel + k * stride);
    const __m512 right = _mm512_loadu_ps(panel + k * stride + kLanes);
    for (int line = 0; line < lines; line++) _mm_prefetch(fetch + (k * lines + line) * 64, _MM_HINT_T1);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
      const __m512 both = _mm512_set1_ps(x[row * x_stride + k]);
      sums[row][0] = _mm512_fmadd_ps(both, left, sums[row][0]);
      sums[row][1] = _mm512_fmadd_ps(both, right, sums[row][1]);
    }
  }
}

// ---- float linear: at and n as of the linear product; packed weights have [panels][k][32 columns]

template <int rows, int lines>
inline void float_tile(const Op& op, int64_t row, int64_t panel, const char* fetch) {
  const int64_t columns = op.n[1], k = op.n[2], stride = op.n[3];
  const float* x = static_cast<const float*>(op.at[0]) + row * stride;
  const float* packed = static_cast<const float*>(op.at[1]) + panel * kPanel * k;
  const float* bias = static_cast<const float*>(op.at[2]);
  __m512 sums[rows][2];
  for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
  multiply<rows, lines>(sums, x, stride, packed, kPanel, k, fetch);
  for (int half = 0; half < 2; half++) {
    const int64_t at = panel * kPanel + half * kLanes;
    if (at >= columns) break;
    const __mmask16 mask = first(columns - at);
    const __m512 added = bias ? _mm512_maskz_loadu_ps(mask, bias + at) : _mm512_setzero_ps();
    for (int r = 0; r < rows; r++) {
      float* out = static_cast<float*>(op.at[3]) + (row + r) * columns + at;
      _mm512_mask_storeu_ps(out, mask, _mm512_add_ps(sums[r][half], added));
    }
  }
}

// Bytes of the inputs that one piece reads: they stay in the second cache while the piece's panels pass.
constexpr int64_t kInputBytes = 1 << 19;

inline int64_t float_rows_a_piece(const Op& op) {
  const int64_t fitting = kInputBytes / (op.n[2] * static_cast<int64_t>(sizeof(float)));
  return std::max<int64_t>(kRows, fitting / kRows * kRows);
}

inline int64_t float_linear_pieces(const Op& op) {
  return linear_pieces(op) * ((op.n[0] + float_rows_a_piece(op) - 1) / float_rows_a_piece(op));
}

inline void float_linear(const Op& op, int64_t piece, int threads) {
  const int64_t bytes = op.n[2] * kPanel * static_cast<int64_t>(sizeof(float));
  const int64_t row = piece / linear_pieces(op) * float_rows_a_piece(op);
  const int64_t rows = std::min(float_rows_a_piece(op), op.n[0] - row);
  by_tile(op, piece % linear_pieces(op), row, rows, threads, bytes,
          [&](auto count, auto lines, int64_t from, int64_t panel, const char* fetch) {
            float_tile<count, lines>(op, from, panel, fetch);
          });
}

// ---- layer norm: at = {x, weight, bias or null, out}; n = {rows, size, tensors are bfloat16}; f = {epsilon}

template <class T>
inline void layer_norm(const Op& op, int64_t piece) {
  const int64_t size = op.n[1], last = std::min(op.n[0], (piece + 1) * kRowsAPiece);
  const T* weight = static_cast<const T*>(op.at[1]);
  const T* bias = static_cast<const T*>(op.at[2]);
  for (int64_t row = piece * kRowsAPiece; row < last; row++) {
    const T* x = static_cast<const T*>(op.at[0]) + row * size;
    T* out = static_cast<T*>(op.at[3]) + row * size;
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (int64_t at = 0; at < size; at += kLanes) sum = _mm512_add_ps(sum, load(x + at, first(size - at)));
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / static_cast<float>(size));
    for (int64_t at = 0; at < size; at += kLanes) {
      const __mmask16 mask = first(size - at);
      const __m512 apart = _mm512_maskz_sub_ps(mask, load(x + at, mask), mean);
      squares = _mm512_fmadd_ps(apart, apart, squares);
    }
    const float variance = _mm512_reduce_add_ps(squares) / static_cast<float>(size);
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(variance + static_cast<float>(op.f[0])));
    for (int64_t at = 0; at < size; at += kLanes) {
      const __mmask16 mask = first(size - at);
      const __m512 apart = _mm512_sub_ps(load(x + at, mask), mean);
      const __m512 shift = bias ? load(bias + at, mask) : _mm512_setzero_ps();
      store(out + at, _mm512_fmadd_ps(apart, _mm512_mul_ps(scale, load(weight + at, mask)), shift), mask);
    }
  }
}

inline void layer_norm(const Op& op, int64_t piece) {
  with_type(op.n[2], [&](auto zero) { layer_norm<decltype(zero)>(op, piece); });
}

inline int64_t layer_norm_pieces(const Op& op) { return (op.n[0] + kRowsAPiece - 1) / kRowsAPiece; }

// ---- by value: add: at = {x, y, out}; GELU: at = {x, null, out}; n = {values, tensors are bfloat16}

constexpr int64_t kValuesAPiece = 8192;

inline int64_t value_pieces(const Op& op) { return (op.n[0] + kValuesAPiece - 1) / kValuesAPiece; }

// x (1 + erf(x / sqrt 2)) / 2 as max(x, 0) - |x| erfc(|x| / sqrt 2) / 2, whose error stays below 4e-7: nothing cancels
// below 0. The error of erfc is below 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline __m512 gelu(__m512 x) {
  const __m512 size = _mm512_abs_ps(x), half = _mm512_set1_ps(0.5f), one = _mm512_set1_ps(1.0f);
  const __m512 z = _mm512_mul_ps(size, _mm512_set1_ps(0.70710678118654752f));
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), one));
  __m512 p = _mm512_set1_ps(1.061405429f);
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
  const __m512 decay = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(z, z)));
  const __m512 erfc = _mm512_mul_ps(_mm512_mul_ps(p, t), decay);
  return _mm512_fnmadd_ps(_mm512_mul_ps(half, size), erfc, _mm512_max_ps(x, _mm512_setzero_ps()));
}

// Writes function(x, y) of a piece's values; y is 0 without a second input.
template <class Function>
inline void by_value(const Op& op, int64_t piece, const Function& function) {
  const int64_t last = std::min(op.n[0], (piece + 1) * kValuesAPiece);
  with_type(op.n[1], [&](auto zero) {
    using T = decltype(zero);
    const T* x = static_cast<const T*>(op.at[0]);
    const T* y = static_cast<const T*>(op.at[1]);
    for (int64_t at = piece * kValuesAPiece; at < last; at += kLanes) {
      const __mmask16 mask = first(last - at);
      const __m512 other = y ? load(y + at, mask) : _mm512_setzero_ps();
      store(static_cast<T*>(op.at[2]) + at, function(load(x + at, mask), other), mask);
    }
  });
}

inline void add(const Op& op, int64_t piece) {
  by_value(op, piece, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); });
}

inline void gelu(const Op& op, int64_t piece) {
  by_value(op, piece, [](__m512 x, __m512) { return gelu(x); });
}

// ---- attend within texts: at = {query, key, value, out};
//      n = {heads, heads a key head, head size, causal, window, query stride, key stride, value stride, out stride,
//      tokens with padding, tensors are bfloat16}; f = {scale}. A piece is one head of one text; the last one zeroes
//      padding.

inline int64_t attend_texts_pieces(const Op& op, const Plan& plan) { return plan.rows * op.n[0] + 1; }

// Turns `count` rows of scores into weights of the visible keys, and returns 1 / their sum for each row. A row with
// a visible score that is not finite gets NaN, as its result must not look valid.
inline void soften(const Op& op, float* scores, int64_t width, int64_t row, int count, int64_t length, float* inverse) {
  const __m512 scale = _mm512_set1_ps(static_cast<float>(op.f[0]));
  const int64_t causal = op.n[3], window = op.n[4];
  for (int r = 0; r < count; r++) {
    float* each = scores + r * width;
    const int64_t begin = window ? std::max<int64_t>(0, row + r - window + 1) : 0;
    const int64_t ahead = causal ? 1 : window ? window : length;
    const int64_t end = std::min(length, row + r + ahead);
    __m512 most = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    bool finite = true;
    const auto seen = [&](int64_t at) {
      return static_cast<__mmask16>(first(std::max<int64_t>(0, end - at)) & ~first(std::max<int64_t>(0, begin - at)));
    };
    for (int64_t at = 0; at < length; at += kLanes) {
      const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(each + at), scale);
      _mm512_storeu_ps(each + at, scaled);
      constexpr int kNanOrInfinite = 0x99;
      finite &= !_mm512_mask_fpclass_ps_mask(seen(at), scaled, kNanOrInfinite);
      most = _mm512_mask_max_ps(most, seen(at), most, scaled);
    }
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    __m512 sum = _mm512_setzero_ps();
    for (int64_t at = 0; at < length; at += kLanes) {
      const __m512 share = exponential(_mm512_sub_ps(_mm512_loadu_ps(each + at), largest));
      const __m512 kept = _mm512_maskz_mov_ps(seen(at), share);
      _mm512_storeu_ps(each + at, kept);
      sum = _mm512_add_ps(sum, kept);
    }
    inverse[r] = finite ? 1.0f / _mm512_reduce_add_ps(sum) : std::numeric_limits<float>::quiet_NaN();
  }
}

// Copies `rows` rows of `size` values as floats, one after the other.
inline const float* widen_rows(const bf16* from, int64_t stride, int64_t rows, int64_t size, float* to) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t at = 0; at < size; at += kLanes) store(to + row * size + at, load(from + row * stride + at));
  return to;
}

template <class T>
inline void attend_texts(const Op& op, const Plan& plan, int64_t piece) {
  constexpr bool is_narrow = std::is_same_v<T, bf16>;
  const int64_t heads = op.n[0], size = op.n[2], out_stride = op.n[8];
  T* out = static_cast<T*>(op.at[3]);
  if (piece == plan.rows * heads) {
    for (int64_t token = plan.num_tokens; token < op.n[9]; token++)
      std::memset(out + token * out_stride, 0, heads * size * sizeof(T));
    return;
  }
  const int64_t text = piece / heads, head = piece % heads;
  const int64_t length = plan.seq_lens[text], start = plan.query_start[text];
  if (!length) return;
  const T* query = static_cast<const T*>(op.at[0]) + start * op.n[5] + head * size;
  const T* key = static_cast<const T*>(op.at[1]) + start * op.n[6] + head / op.n[1] * size;
  const T* value = static_cast<const T*>(op.at[2]) + start * op.n[7] + head / op.n[1] * size;
  const int64_t panels = (length + kPanel - 1) / kPanel, width = panels * kPanel;
  // Keys in panels, [panels][size][32 keys], and the scores of a block of rows; values and a block of queries, if
  // they must become floats. A long text's are not kept.
  constexpr int64_t kMostKept = 1 << 18;
  static thread_local std::vector<float> kept;
  std::vector<float> passing;
  const int64_t needed = width * (size + kRows) + (is_narrow ? (length + kRows) * size : 0);
  std::vector<float>& memory = needed > kMostKept ? passing : kept;
  if (static_cast<int64_t>(memory.size()) < needed) memory.resize(needed);
  float* keys = memory.data();
  float* scores = keys + width * size;
  float* widened = scores + width * kRows;
  for (int64_t at = 0; at < width; at++)
    for (int64_t i = 0; i < size; i++) {
      float each = 0.0f;
      if (at < length) {
        if constexpr (is_narrow)
          each = widen(key[at * op.n[6] + i]);
        else
          each = key[at * op.n[6] + i];
      }
      keys[(at / kPanel * size + i) * kPanel + at % kPanel] = each;
    }
  const float* values;
  int64_t value_stride;
  if constexpr (is_narrow) {
    values = widen_rows(value, op.n[7], length, size, widened + kRows * size);
    value_stride = size;
  } else {
    values = value;
    value_stride = op.n[7];
  }
  by_block(length, [&](int64_t, int64_t row, auto count) {
    const float* queries;
    int64_t query_stride;
    if constexpr (is_narrow) {
      queries = widen_rows(query + row * op.n[5], op.n[5], count, size, widened);
      query_stride = size;
    } else {
      queries = query + row * op.n[5];
      query_stride = op.n[5];
    }
    for (int64_t panel = 0; panel < panels; panel++) {
      __m512 sums[count][2];
      for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
      multiply<count, 0>(sums, queries, query_stride, keys + panel * size * kPanel, kPanel, size, nullptr);
      for (int r = 0; r < count; r++)
        for (int half = 0; half < 2; half++)
          _mm512_storeu_ps(scores + r * width + panel * kPanel + half * kLanes, sums[r][half]);
    }
    float inverse[count];
    soften(op, scores, width, row, count, length, inverse);
    for (int64_t column = 0; column < size; column += kPanel) {
      __m512 sums[count][2];
      for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
      multiply<count, 0>(sums, scores, width, values + column, value_stride, length, nullptr);
      for (int r = 0; r < count; r++)
        for (int half = 0; half < 2; half++)
          store(out + (start + row + r) * out_stride + head * size + column + half * kLanes,
                _mm512_mul_ps(sums[r][half], _mm512_set1_ps(inverse[r])));
    }
  });
}

inline void attend_texts(const Op& op, const Plan& plan, int64_t piece) {
  with_type(op.n[10], [&](auto zero) { attend_texts<decltype(zero)>(op, plan, piece); });
}

}  // namespace triptych
