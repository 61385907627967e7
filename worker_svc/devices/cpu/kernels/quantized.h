// Products with weights of 4 or 8 bits, whose codes become bfloat16 in registers.
//
// Every code is an integer of at most 8 bits, so bfloat16 holds it exactly. The products of one group of inputs are
// added as integers of activations and codes; the group's scale multiplies their sum once, in float32.
#pragma once

#include <vector>

#include "layers.h"

namespace triptych {

// ---- quantized: like linear; n = {…, group, bits}; f = {factor of all scales}.
//      Packed weights are [panels][groups]: 32 scales (float16), then the codes of the group's inputs.

constexpr int64_t kScaleBytes = kPanel * 2;

inline int64_t group_bytes(int64_t group, int64_t bits) { return kScaleBytes + group * kPanel * bits / 8; }

// 64 bytes of codes become both halves of a panel for each pair of inputs, in this order.

// Two pairs: 16 bits hold the codes of one lane in the halves of both.
struct FourBits {
  static constexpr int kBits = 4, kInputs = 4;
  static inline void unpack(const char* at, __m512i (&to)[kInputs]) {
    // bfloat16 of -8 to 7, twice: a lookup takes five bits, and the fifth belongs to the next code.
    alignas(64) static constexpr uint16_t kValues[32] = {
        0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
        0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
        0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
    const __m512i values = _mm512_load_si512(kValues), codes = _mm512_loadu_si512(at);
    to[0] = _mm512_permutexvar_epi16(codes, values);
    to[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), values);
    to[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), values);
    to[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), values);
  }
};

// One pair.
struct EightBits {
  static constexpr int kBits = 8, kInputs = 2;
  static inline __m512 widened(const char* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  }
  static inline void unpack(const char* at, __m512i (&to)[kInputs]) {
    for (int half = 0; half < 2; half++)
      to[half] = (__m512i)_mm512_cvtne2ps_pbh(widened(at + 32 * half + 16), widened(at + 32 * half));
  }
};

// Adds a group's sums, times its scales, to the totals.
template <int rows>
inline void scale_sums(__m512 (&totals)[rows][2], const __m512 (&sums)[rows][2], const char* scales) {
  for (int half = 0; half < 2; half++) {
    const __m512 scale =
        _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + half * kScaleBytes / 2)));
    for (int r = 0; r < rows; r++) totals[r][half] = _mm512_fmadd_ps(sums[r][half], scale, totals[r][half]);
  }
}

template <int rows>
inline void write_totals(const Op& op, int64_t row, int64_t panel, __m512 (&totals)[rows][2]) {
  const __m512 factor = _mm512_set1_ps(static_cast<float>(op.f[0]));
  for (auto& total : totals)
    for (auto& half : total) half = _mm512_mul_ps(half, factor);
  write_tile<rows>(op, row, panel, totals);
}

// Computes the first rows of one panel. Codes are unpacked into registers, while other units multiply.
//   fetch: the panel to prefetch, or null.
//   kept: where to store the unpacked codes for the other rows, [inputs / 2][32 columns][2] as bfloat16.
template <class Source, int rows, bool keep>
inline void first_rows(const Op& op, int64_t panel, const char* packed, const char* fetch, __m512i* kept) {
  const int64_t stride = op.n[3], group = op.n[5];
  const bf16* x = static_cast<const bf16*>(op.at[0]);
  __m512 totals[rows][2];
  for (auto& total : totals) total[0] = total[1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < op.n[2];) {
    const char* scales = packed;
    __m512 sums[rows][2];
    for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
    packed += kScaleBytes;
    if (fetch) _mm_prefetch(fetch, _MM_HINT_T1), fetch += kScaleBytes;
    for (int64_t line = 0; line < group / Source::kInputs; line++, packed += 64, k += Source::kInputs) {
      if (fetch) _mm_prefetch(fetch, _MM_HINT_T1), fetch += 64;
      __m512i unpacked[Source::kInputs];
      Source::unpack(packed, unpacked);
      if (keep)
        for (auto& half : unpacked) _mm512_store_si512(kept++, half);
#pragma GCC unroll 2
      for (int pair = 0; pair < Source::kInputs / 2; pair++)
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
          int values;
          std::memcpy(&values, x + r * stride + k + 2 * pair, sizeof(values));
          const __m512bh both = (__m512bh)_mm512_set1_epi32(values);
          sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, (__m512bh)unpacked[2 * pair]);
          sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, (__m512bh)unpacked[2 * pair + 1]);
        }
    }
    scale_sums<rows>(totals, sums, scales);
  }
  write_totals<rows>(op, 0, panel, totals);
}

// Computes other rows with the codes that first_rows() kept: the same additions in the same order.
template <class Source, int rows>
inline void more_rows(const Op& op, int64_t row, int64_t panel, const char* packed, const __m512i* kept) {
  const int64_t stride = op.n[3], group = op.n[5];
  const bf16* x = static_cast<const bf16*>(op.at[0]) + row * stride;
  __m512 totals[rows][2];
  for (auto& total : totals) total[0] = total[1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < op.n[2]; k += group, packed += group_bytes(group, Source::kBits), kept += group) {
    __m512 sums[rows][2];
    for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
    multiply<rows, 0>(sums, x + k, stride, reinterpret_cast<const bf16*>(kept), 2 * kPanel, group / 2, nullptr);
    scale_sums<rows>(totals, sums, packed);
  }
  write_totals<rows>(op, row, panel, totals);
}

template <class Source>
inline void quantized_panels(const Op& op, int64_t piece, int threads) {
  static thread_local std::vector<__m512i> kept;
  const int64_t rows = op.n[0], each = panels_a_piece(op), last = std::min(panels_of(op), (piece + 1) * each);
  const int64_t bytes = op.n[2] / op.n[5] * group_bytes(op.n[5], Source::kBits);
  const int64_t blocks = (rows + kRows - 1) / kRows;
  if (blocks > 1 && static_cast<int64_t>(kept.size()) < op.n[2]) kept.resize(op.n[2]);
  for (int64_t panel = piece * each; panel < last; panel++) {
    const char* fetch = next_panel(op, bytes, panel, each, threads);
    const char* packed = static_cast<const char*>(op.at[1]) + panel * bytes;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t from = rows * block / blocks, to = rows * (block + 1) / blocks;
      with_rows(static_cast<int>(to - from), [&](auto count) {
        if (block)
          more_rows<Source, count>(op, from, panel, packed, kept.data());
        else if (blocks > 1)
          first_rows<Source, count, true>(op, panel, packed, fetch, kept.data());
        else
          first_rows<Source, count, false>(op, panel, packed, fetch, nullptr);
      });
    }
  }
  if (op.n[4]) _mm_sfence();
}

inline void quantized(const Op& op, int64_t piece, int threads) {
  if (op.n[6] == FourBits::kBits)
    quantized_panels<FourBits>(op, piece, threads);
  else
    quantized_panels<EightBits>(op, piece, threads);
}

// Packs one panel of `columns` (at most 32) columns. Codes are [columns][k] without sign; half of their range is 0.
inline void pack_codes(const uint8_t* codes, const uint16_t* scales, char* to, int64_t columns, int64_t k,
                       int64_t group, int64_t bits) {
  const int64_t groups = k / group;
  std::memset(to, 0, groups * group_bytes(group, bits));
  for (int64_t g = 0; g < groups; g++, to += group_bytes(group, bits))
    for (int64_t column = 0; column < columns; column++) {
      std::memcpy(to + 2 * column, scales + column * groups + g, 2);
      for (int64_t i = 0; i < group; i++) {
        const uint8_t code = codes[column * k + g * group + i];
        // A half of a panel has 16 columns of two inputs.
        const int64_t lane = 2 * (column % kLanes) + i % 2, half = column / kLanes;
        if (bits == 8) {
          to[kScaleBytes + i / 2 * 64 + half * 32 + lane] = static_cast<char>(code ^ 0x80);
        } else {
          const int64_t nibble = 2 * (i / 2 % 2) + half;
          to[kScaleBytes + i / 4 * 64 + 2 * lane + nibble / 2] |= static_cast<char>(code << (nibble % 2 * 4));
        }
      }
    }
}

}  // namespace triptych
