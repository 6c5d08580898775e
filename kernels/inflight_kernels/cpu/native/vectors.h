// Sixteen floats at a time: bfloat16 in and out, exponentials, sums.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "formats.h"

namespace inflight {

using Floats = __m512;

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }
inline int64_t round_up(int64_t value, int64_t multiple) { return ceil_div(value, multiple) * multiple; }

/// Lanes below `count`.
inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

inline Floats splat(float value) { return _mm512_set1_ps(value); }

inline Floats widen(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }

inline Floats load(const Element* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }

inline Floats load(const Element* from, __mmask16 lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, from)); }

/// To nearest, ties to even, as torch rounds, but for numbers below 2 ** -126, which become 0.
inline __m256i narrow(Floats x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

inline void store(Element* to, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(x)); }

inline void store(Element* to, Floats x, __mmask16 lanes) { _mm256_mask_storeu_epi16(to, lanes, narrow(x)); }

/// 32 of them.
inline void store(Element* to, Floats low, Floats high) {
  _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
}

/// What a bfloat16 keeps of it.
inline Floats rounded(Floats x) { return widen(narrow(x)); }

/// 2 ** x within 3e-6 of it; 0 far below -126. x is not infinite.
inline Floats exp2(Floats x) {
  const Floats whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats part = _mm512_sub_ps(x, whole);
  // The Taylor series of exp(part * ln 2), part in [-0.5, 0.5].
  Floats sum = splat(1.3333558e-3f);
  sum = _mm512_fmadd_ps(sum, part, splat(9.6181291e-3f));
  sum = _mm512_fmadd_ps(sum, part, splat(5.5504109e-2f));
  sum = _mm512_fmadd_ps(sum, part, splat(2.4022651e-1f));
  sum = _mm512_fmadd_ps(sum, part, splat(6.9314718e-1f));
  sum = _mm512_fmadd_ps(sum, part, splat(1.0f));
  return _mm512_scalef_ps(sum, whole);
}

constexpr float LOG2_E = 1.44269504f;

inline Floats silu(Floats x) {
  // Where x is no number, min gives its second operand: x, so that it stays none.
  const Floats decay = exp2(_mm512_min_ps(splat(127.0f), _mm512_mul_ps(x, splat(-LOG2_E))));
  return _mm512_div_ps(x, _mm512_add_ps(decay, splat(1.0f)));
}

/// Lane n is the sum of x[n].
inline Floats sums_of(Floats (&x)[16]) {
  // In each quarter of a vector: halves of two sums, then four sums of that quarter.
  for (int i = 0; i < 8; ++i) {
    const int first = i / 2 * 4 + i % 2;
    const Floats a = x[first], b = x[first + 2];
    x[first] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 16; i += 4)
    x[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[i], x[i + 1]), _mm512_unpackhi_ps(x[i], x[i + 1]));
  const auto add_quarters = [](Floats a, Floats b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return add_quarters(add_quarters(x[0], x[4]), add_quarters(x[8], x[12]));
}

/// A 16 by 16 matrix of 32-bit elements, its rows made columns.
inline void transpose(__m512i (&rows)[16]) {
  __m512i pairs[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    pairs[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    pairs[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    pairs[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    pairs[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(pairs[i], pairs[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(pairs[i], pairs[i + 8], 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(pairs[i + 4], pairs[i + 12], 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(pairs[i + 4], pairs[i + 12], 0xdd);
  }
}

}  // namespace inflight
