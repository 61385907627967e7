// Vectors of 16 floats or 32 bfloat16 values, and the inner loop of all products.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace triptych {

using bf16 = uint16_t;

constexpr int kLanes = 16;
// Columns of a panel: packed weights and cached keys have [panels][k / 2][32 columns][2].
constexpr int kPanel = 32;
// As many rows as fit: their sums, two vectors of a panel and one of a row are in registers.
constexpr int kRows = 12;
inline __m512 widen(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

inline float widen(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

inline __mmask16 first(int64_t count) {
  return count >= kLanes ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1);
}

inline __m512 load(const bf16* at) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); }
inline __m512 load(const bf16* at, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, at)); }
inline void store(bf16* at, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), narrow(values));
}
inline void store(bf16* at, __m512 values, __mmask16 mask) { _mm256_mask_storeu_epi16(at, mask, narrow(values)); }

inline __m512 load(const float* at) { return _mm512_loadu_ps(at); }
inline __m512 load(const float* at, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, at); }
inline void store(float* at, __m512 values) { _mm512_storeu_ps(at, values); }
inline void store(float* at, __m512 values, __mmask16 mask) { _mm512_mask_storeu_ps(at, mask, values); }

// Calls `work` with a value of the type in which tensors are stored.
template <class Work>
inline void with_type(bool is_narrow, const Work& work) {
  if (is_narrow)
    work(bf16{});
  else
    work(float{});
}

// e^x, accurate to about one unit in the last place; 0 below -87. With x = n ln 2 + r and |r| <= ln 2 / 2,
// e^x is 2^n times a polynomial in r (coefficients from Cephes).
inline __m512 exponential(__m512 x) {
  const __m512 bounded = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(88.3f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), bounded);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), tiny, _mm512_setzero_ps());
}

inline float exponential(float x) { return _mm512_cvtss_f32(exponential(_mm512_set1_ps(x))); }

inline __m512 sigmoid(__m512 x) {
  const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

// Sums of `rows` rows times one panel, [rows][32] floats.
//   x: pairs of values, a row every `x_stride` values.
//   panel: 64 values a pair, a pair every `stride` values.
//   fetch: the address to prefetch, `lines` lines of 64 bytes a pair. The processor's own prefetchers leave
//     memory idle while several blocks of rows use a panel that is in the cache already.
template <int rows, int lines>
inline void multiply(__m512 (&sums)[rows][2], const bf16* __restrict x, int64_t x_stride,
                     const bf16* __restrict panel, int64_t stride, int64_t pairs, const char* fetch) {
  for (int64_t k = 0; k < pairs; k++) {
    const __m512bh left = (__m512bh)_mm512_loadu_si512(panel + k * stride);
    const __m512bh right = (__m512bh)_mm512_loadu_si512(panel + k * stride + kPanel);
    for (int line = 0; line < lines; line++) _mm_prefetch(fetch + (k * lines + line) * 64, _MM_HINT_T1);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
      int pair;
      std::memcpy(&pair, x + row * x_stride + 2 * k, sizeof(pair));
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], both, left);
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], both, right);
    }
  }
}

// Calls `work` with the number of rows, 1 to kRows, known to the compiler.
template <int most = kRows, class Work>
inline void with_rows(int rows, const Work& work) {
  if constexpr (most > 0) {
    if (rows == most)
      work(std::integral_constant<int, most>{});
    else
      with_rows<most - 1>(rows, work);
  }
}

// Calls `work` with the number, the first row and the number of rows of each block; the blocks are about equally
// large. The number of rows is known to the compiler.
template <class Work>
inline void by_block(int64_t rows, const Work& work) {
  const int64_t blocks = (rows + kRows - 1) / kRows;
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t from = rows * block / blocks, to = rows * (block + 1) / blocks;
    with_rows(static_cast<int>(to - from), [&](auto count) { work(block, from, count); });
  }
}

}  // namespace triptych
