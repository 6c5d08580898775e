// AVX-512 with BW, DQ and VL, and with BF16 where the compiler may use it: sixteen floats are a register.
#pragma once

#include <cstdint>

#include "../formats.h"
#include "x86.h"

namespace inflight {

using Floats = __m512;

/// Of 32 registers products of up to six rows keep 24 sums; see product_of. Those of whole numbers keep totals besides.
constexpr int64_t MAX_ROWS_IN_VECTORS = 6, MAX_OF_FEW_ROWS = 4;
#ifdef __AVX512VNNI__
constexpr int64_t MAX_ROWS_OF_INTEGERS = 4;
#else
/// What makes codes positive is done once for all of them.
constexpr int64_t MAX_ROWS_OF_INTEGERS = 6;
#endif
constexpr int64_t tiles_at_once(int64_t) { return 2; }
/// Whether registers have room for the totals of groups beside their sums; else they are in memory.
constexpr bool KEEPS_TOTALS = true;

/// Lanes below `count`.
inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

inline Floats splat(float value) { return _mm512_set1_ps(value); }
inline float first_of(Floats x) { return _mm512_cvtss_f32(x); }

/// It stays in registers, and is not read from memory again where it is used.
inline void hold(Floats& x) { asm("" : "+v"(x)); }

/// a * b + c, a * b - c and c - a * b, rounded once.
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }

/// `b` where one of them is no number.
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline void store(float* to, Floats x, int64_t count) { _mm512_mask_storeu_ps(to, first_lanes(count), x); }

inline Floats widen_bf16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/// To nearest, ties to even, as torch rounds, but for numbers below 2 ** -126, which become 0.
inline __m256i narrow_bf16(Floats x) {
#ifdef __AVX512BF16__
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
  const __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(high, _mm512_set1_epi32(1)));
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __mmask16 is_nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  const __mmask16 is_denormal = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x00800000));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
  rounded = _mm512_mask_and_epi32(rounded, is_denormal, high, _mm512_set1_epi32(0x8000));
  return _mm512_cvtepi32_epi16(rounded);
#endif
}

inline Floats load(const Bf16* from) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline Floats load(const Bf16* from, int64_t count) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(count), from));
}
inline void store(Bf16* to, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow_bf16(x)); }
inline void store(Bf16* to, Floats x, int64_t count) {
  _mm256_mask_storeu_epi16(to, first_lanes(count), narrow_bf16(x));
}

inline __m256i narrow_f16(Floats x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Floats load(const F16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Floats load(const F16* from, int64_t count) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), from));
}
inline void store(F16* to, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow_f16(x)); }
inline void store(F16* to, Floats x, int64_t count) { _mm256_mask_storeu_epi16(to, first_lanes(count), narrow_f16(x)); }

/// What the format keeps of them.
inline Floats rounded_to(const Bf16*, Floats x) { return widen_bf16(narrow_bf16(x)); }
inline Floats rounded_to(const F16*, Floats x) { return _mm512_cvtph_ps(narrow_f16(x)); }

/// The even, or the odd, element of sixteen pairs.
inline Floats even_of_pairs(const Bf16* pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
}
inline Floats odd_of_pairs(const Bf16* pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32(0xffff0000)));
}

/// Sixteen pairs of one element of each.
inline void interleave(const Bf16* even, const Bf16* odd, Bf16* pairs) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
  const __m512i both = _mm512_inserti64x4(low, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)), 1);
  _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16(order, both));
}

/// Sixteen pairs of one element of each, which hold nothing but what bfloat16 keeps.
inline __m512i joined(Floats even, Floats odd) {
  const __m512i upper = _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32(0xffff0000));
  return _mm512_or_si512(upper, _mm512_srli_epi32(_mm512_castps_si512(even), 16));
}
inline void store_pairs(Bf16* to, Floats even, Floats odd) { _mm512_storeu_si512(to, joined(even, odd)); }

/// Sixteen codes of 8 bits: whole numbers, and fp8 (1, 4 and 3 bits) times 2 ** -8.
inline Floats load_int8(const char* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline Floats load_fp8(const char* from) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(0xbf80 - 0x10000)));
}

/// Thirty-two numbers of fp8 as a format of 16 bits has them.
template <class Format>
inline __m512i halves_of(const E4m3* from) {
  using As = Fp8As<Format>;
  const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const __m512i magnitudes = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
  const __m512i small = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(As::SMALL)));
  __m512i halves = _mm512_add_epi16(_mm512_slli_epi16(magnitudes, As::SHIFT), _mm512_set1_epi16(As::BIAS));
  const __mmask32 is_small = _mm512_cmplt_epi16_mask(magnitudes, _mm512_set1_epi16(8));
  halves = _mm512_mask_permutexvar_epi16(halves, is_small, magnitudes, small);
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitudes, _mm512_set1_epi16(0x7f));
  halves = _mm512_mask_mov_epi16(halves, is_nan, _mm512_set1_epi16(As::NO_NUMBER));
  return _mm512_or_si512(halves, _mm512_and_si512(words, _mm512_set1_epi16(INT16_MIN)));
}
/// Thirty-two, what is no number too.
template <class Format>
inline void widen(const E4m3* from, Format* to) {
  _mm512_storeu_si512(to, halves_of<Format>(from));
}
inline void widen(const E4m3* from, float* to) {
  const __m512i halves = halves_of<Bf16>(from);
  store(to, widen_bf16(_mm512_castsi512_si256(halves)));
  store(to + 16, widen_bf16(_mm512_extracti64x4_epi64(halves, 1)));
}
/// Numbers up to 448: to nearest, ties to even, as torch rounds. What is none stays none.
inline void store(E4m3* to, Floats x) {
  // Neighbours are an eighth of the power of 2 below them apart, but not less than 2 ** -9. To 1.5 * 2 ** 23 times that
  // no more than whole neighbours can be added.
  const Floats power = max(splat(0x1p-6f), _mm512_and_ps(x, _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000))));
  const Floats shift = power * splat(0x1.8p20f), kept = (x + shift) - shift;
  // The inverse of load_fp8, but for the sign of what becomes 0.
  const __m256i halves = narrow_f16(_mm512_or_ps(kept * splat(0x1p-8f), _mm512_and_ps(x, splat(-0.0f))));
  const __m256i magnitudes = _mm256_and_si256(halves, _mm256_set1_epi16(0x7fff)), nan = _mm256_set1_epi16(0x3f80);
  const __m256i codes = _mm256_srli_epi16(_mm256_min_epu16(magnitudes, nan), 7);
  const __m256i signs = _mm256_and_si256(_mm256_srli_epi16(halves, 8), _mm256_set1_epi16(0x80));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtepi16_epi8(_mm256_or_si256(codes, signs)));
}

/// Of the sixteen codes of 4 bits that are at `shift` of words of 32: whole numbers, or those that `numbers` has.
inline Floats load_chosen(const float (&numbers)[16], const char* words, int shift) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(words), shift), _mm512_loadu_ps(numbers));
}
/// The same of 32 codes, at `shift` of words of 16: pairs of bfloat16. `numbers` has them twice.
inline __m512i load_chosen_pairs(const uint16_t (&numbers)[32], const char* words, int shift) {
  return _mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(words), shift), _mm512_loadu_si512(numbers));
}
inline Floats load_int4(const char* words, int shift) {
  static constexpr float NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  return load_chosen(NUMBERS, words, shift);
}

/// Sixteen whole numbers of 32 bits, or 64 of 8 bits: four for each of sixteen columns.
using Ints = __m512i;

inline Ints whole(int32_t value) { return _mm512_set1_epi32(value); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints load_whole(const void* from) { return _mm512_loadu_si512(from); }
inline void store_whole(void* to, Ints x) { _mm512_storeu_si512(to, x); }

/// Of 64 bytes the lower, or the upper, halves: from 0 to 15.
inline Ints low_halves(Ints bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline Ints high_halves(Ints bytes) { return low_halves(_mm512_srli_epi16(bytes, 4)); }
inline Ints less_in_bytes(Ints bytes, Ints other) { return _mm512_sub_epi8(bytes, other); }

/// What is added to each of the codes of 8 bits that are multiplied, which are signed otherwise.
#ifdef __AVX512VNNI__
constexpr int32_t INT8_OFFSET = 128;
inline Ints with_offset(Ints codes) { return _mm512_xor_si512(codes, _mm512_set1_epi8(-128)); }
#else
constexpr int32_t INT8_OFFSET = 0;
inline Ints with_offset(Ints codes) { return codes; }
#endif

/// To each of sixteen sums four products, with codes of 8 bits and four numbers from -127 to 127.
inline Ints add_products(Ints sums, Ints codes, int32_t numbers) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(numbers));
#else
  const __m512i x = _mm512_set1_epi32(numbers);
  const __m512i signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), x);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(codes), signed_x);
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

/// The same for codes from 0 to 15, up to eight times between `begin_small` and `end_small`.
#ifdef __AVX512VNNI__
inline Ints begin_small(Ints sums) { return sums; }
inline Ints add_small(Ints part, Ints codes, int32_t numbers) { return add_products(part, codes, numbers); }
inline Ints end_small(Ints, Ints part) { return part; }
#else
inline Ints begin_small(Ints) { return _mm512_setzero_si512(); }
inline Ints add_small(Ints part, Ints codes, int32_t numbers) {
  return _mm512_add_epi16(part, _mm512_maddubs_epi16(codes, _mm512_set1_epi32(numbers)));
}
inline Ints end_small(Ints sums, Ints part) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(part, _mm512_set1_epi16(1)));
}
#endif

/// As whole numbers of 8 bits, to nearest, ties to even; they are below 128.
inline void store_int8(int8_t* to, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/// x * 2 ** whole, for x in [0.5, 2) and whole numbers up to 127; 0 where that is denormal.
inline Floats times_power_of_2(Floats x, Floats whole) { return _mm512_scalef_ps(x, whole); }

/// x in the lanes from `first` to below `end`, `other` in all others.
inline Floats keep_lanes(Floats x, int64_t first, int64_t end, Floats other) {
  return _mm512_mask_mov_ps(other, first_lanes(end) & ~first_lanes(first), x);
}

/// `then` where x is below `limit`, else x.
inline Floats replace_below(Floats x, Floats limit, Floats then) {
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), then);
}

/// Whether any lanes differ.
inline bool differ(Floats a, Floats b) { return _mm512_cmpneq_ps_mask(a, b); }

/// Lanes n and n + 8 are added up, then n and n + 4, n + 2, n + 1.
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }

/// Lane n is the sum of x[n].
inline Floats sums_of(Floats (&x)[16]) {
  // In each quarter of a vector: halves of two sums, then four sums of that quarter.
  for (int i = 0; i < 8; ++i) {
    const int first = i / 2 * 4 + i % 2;
    const Floats a = x[first], b = x[first + 2];
    x[first] = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  }
  for (int i = 0; i < 16; i += 4) x[i] = _mm512_unpacklo_ps(x[i], x[i + 1]) + _mm512_unpackhi_ps(x[i], x[i + 1]);
  const auto add_quarters = [](Floats a, Floats b) {
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  };
  return add_quarters(add_quarters(x[0], x[4]), add_quarters(x[8], x[12]));
}

/// A 16 by 16 matrix of 32-bit elements, its rows made columns.
inline void transpose(Floats (&rows)[16]) {
  Floats pairs[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  const auto join = [](Floats a, Floats b, auto unpack) {
    return _mm512_castpd_ps(unpack(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = join(pairs[i + j], pairs[i + j + 2], [](auto a, auto b) { return _mm512_unpacklo_pd(a, b); });
      rows[i + 2 * j + 1] =
          join(pairs[i + j], pairs[i + j + 2], [](auto a, auto b) { return _mm512_unpackhi_pd(a, b); });
    }
  }
  for (int i = 0; i < 4; ++i) {
    pairs[i] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88);
    pairs[i + 4] = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xdd);
    pairs[i + 8] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0x88);
    pairs[i + 12] = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_f32x4(pairs[i], pairs[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(pairs[i], pairs[i + 8], 0xdd);
    rows[i + 4] = _mm512_shuffle_f32x4(pairs[i + 4], pairs[i + 12], 0x88);
    rows[i + 12] = _mm512_shuffle_f32x4(pairs[i + 4], pairs[i + 12], 0xdd);
  }
}

}  // namespace inflight
