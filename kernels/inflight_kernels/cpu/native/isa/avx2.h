// AVX2 with FMA and F16C, and with AVX-VNNI where the compiler may use it: sixteen floats are two registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../formats.h"
#include "x86.h"

namespace inflight {

struct Floats {
  __m256 low, high;
};

/// Of 16 registers products of up to three rows keep 12 sums; see product_of.
constexpr int64_t MAX_ROWS_IN_VECTORS = 3, MAX_OF_FEW_ROWS = 3, MAX_ROWS_OF_INTEGERS = 4;
constexpr int64_t tiles_at_once(int64_t num_rows) { return num_rows == 1 ? 2 : 1; }
/// Whether registers have room for the totals of groups beside their sums; else they are in memory.
constexpr bool KEEPS_TOTALS = false;

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }

inline Floats splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline float first_of(Floats x) { return _mm256_cvtss_f32(x.low); }

/// It stays in registers, and is not read from memory again where it is used.
inline void hold(Floats& x) { asm("" : "+x"(x.low), "+x"(x.high)); }

/// a * b + c, a * b - c and c - a * b, rounded once.
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fms(Floats a, Floats b, Floats c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline Floats fnma(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}

/// `b` where one of them is no number.
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }

inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}

inline __m256 widen_bf16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/// 16 bits of each of 32-bit elements.
inline __m128i halves_of(__m256i words) {
  const __m256i packed = _mm256_packus_epi32(words, words);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

/// To nearest, ties to even, as torch rounds, but for numbers below 2 ** -126, which become 0.
inline __m128i narrow_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
  const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, _mm256_set1_epi32(1)));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  const __m256i is_denormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i zero = _mm256_and_si256(high, _mm256_set1_epi32(0x8000));
  return halves_of(_mm256_blendv_epi8(_mm256_blendv_epi8(rounded, quiet, is_nan), zero, is_denormal));
}

inline __m128i load_8(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline void store_8(void* to, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(to), x); }

inline Floats load(const Bf16* from) { return {widen_bf16(load_8(from)), widen_bf16(load_8(from + 8))}; }
inline void store(Bf16* to, Floats x) {
  store_8(to, narrow_bf16(x.low));
  store_8(to + 8, narrow_bf16(x.high));
}

inline __m128i narrow_f16(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Floats load(const F16* from) { return {_mm256_cvtph_ps(load_8(from)), _mm256_cvtph_ps(load_8(from + 8))}; }
inline void store(F16* to, Floats x) {
  store_8(to, narrow_f16(x.low));
  store_8(to + 8, narrow_f16(x.high));
}

/// What the format keeps of them.
inline Floats rounded_to(const Bf16*, Floats x) {
  return {widen_bf16(narrow_bf16(x.low)), widen_bf16(narrow_bf16(x.high))};
}
inline Floats rounded_to(const F16*, Floats x) {
  return {_mm256_cvtph_ps(narrow_f16(x.low)), _mm256_cvtph_ps(narrow_f16(x.high))};
}

/// The even, or the odd, element of sixteen pairs.
inline Floats even_of_pairs(const Bf16* pairs) {
  const auto of_eight = [](__m256 x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16)); };
  const Floats x = load(reinterpret_cast<const float*>(pairs));
  return {of_eight(x.low), of_eight(x.high)};
}
inline Floats odd_of_pairs(const Bf16* pairs) {
  const __m256 odd = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff0000));
  const Floats x = load(reinterpret_cast<const float*>(pairs));
  return {_mm256_and_ps(x.low, odd), _mm256_and_ps(x.high, odd)};
}

/// Sixteen pairs of one element of each.
inline void interleave(const Bf16* even, const Bf16* odd, Bf16* pairs) {
  for (int i = 0; i < 16; i += 8) {
    const __m128i a = load_8(even + i), b = load_8(odd + i);
    store_8(pairs + 2 * i, _mm_unpacklo_epi16(a, b));
    store_8(pairs + 2 * i + 8, _mm_unpackhi_epi16(a, b));
  }
}

/// Sixteen pairs of one element of each, which hold nothing but what bfloat16 keeps.
inline void store_pairs(Bf16* to, Floats even, Floats odd) {
  const auto joined = [](__m256 lower, __m256 upper) {
    return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(lower), 16), _mm256_castps_si256(upper), 0xaa);
  };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), joined(even.low, odd.low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 16), joined(even.high, odd.high));
}

/// Sixteen codes of 8 bits: whole numbers, and fp8 (1, 4 and 3 bits) times 2 ** -8.
inline Floats load_int8(const char* from) {
  const __m128i codes = load_8(from);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
}
inline Floats load_fp8(const char* from) {
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_8(from)), 7);
  const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16(0xbf80 - 0x10000));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

/// Sixteen numbers of fp8 as a format of 16 bits has them.
template <class Format>
inline __m256i halves_of(const E4m3* from) {
  using As = Fp8As<Format>;
  const __m256i words = _mm256_cvtepi8_epi16(load_8(from));
  const __m256i magnitudes = _mm256_and_si256(words, _mm256_set1_epi16(0x7f));
  const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(magnitudes, As::SHIFT), _mm256_set1_epi16(As::BIAS));
  // The numbers of both bytes of SMALL[magnitude].
  const __m256i bytes = _mm256_mullo_epi16(magnitudes, _mm256_set1_epi16(0x0202));
  const __m256i small = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_8(As::SMALL)),
                                            _mm256_add_epi16(bytes, _mm256_set1_epi16(0x0100)));
  const __m256i is_normal = _mm256_cmpgt_epi16(magnitudes, _mm256_set1_epi16(7));
  const __m256i is_nan = _mm256_cmpeq_epi16(magnitudes, _mm256_set1_epi16(0x7f));
  const __m256i numbers = _mm256_blendv_epi8(small, normal, is_normal);
  return _mm256_or_si256(_mm256_blendv_epi8(numbers, _mm256_set1_epi16(As::NO_NUMBER), is_nan),
                         _mm256_and_si256(words, _mm256_set1_epi16(INT16_MIN)));
}
/// Thirty-two, what is no number too.
template <class Format>
inline void widen(const E4m3* from, Format* to) {
  for (int i = 0; i < 32; i += 16) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), halves_of<Format>(from + i));
}
inline void widen(const E4m3* from, float* to) {
  for (int i = 0; i < 32; i += 16) {
    const __m256i halves = halves_of<Bf16>(from + i);
    store(to + i, {widen_bf16(_mm256_castsi256_si128(halves)), widen_bf16(_mm256_extracti128_si256(halves, 1))});
  }
}
/// Sixteen bits with the code of each number up to 448: to nearest, ties to even, as torch rounds. What is none stays
/// none.
inline __m128i narrow_e4m3(__m256 x) {
  // Neighbours are an eighth of the power of 2 below them apart, but not less than 2 ** -9. To 1.5 * 2 ** 23 times that
  // no more than whole neighbours can be added.
  const __m256 exponent = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
  const __m256 power = _mm256_max_ps(_mm256_set1_ps(0x1p-6f), _mm256_and_ps(x, exponent));
  const __m256 shift = _mm256_mul_ps(power, _mm256_set1_ps(0x1.8p20f));
  const __m256 kept = _mm256_mul_ps(_mm256_sub_ps(_mm256_add_ps(x, shift), shift), _mm256_set1_ps(0x1p-8f));
  // The inverse of load_fp8, but for the sign of what becomes 0.
  const __m128i halves = narrow_f16(_mm256_or_ps(kept, _mm256_and_ps(x, _mm256_set1_ps(-0.0f))));
  const __m128i magnitudes = _mm_and_si128(halves, _mm_set1_epi16(0x7fff)), nan = _mm_set1_epi16(0x3f80);
  const __m128i codes = _mm_srli_epi16(_mm_min_epu16(magnitudes, nan), 7);
  return _mm_or_si128(codes, _mm_and_si128(_mm_srli_epi16(halves, 8), _mm_set1_epi16(0x80)));
}
inline void store(E4m3* to, Floats x) { store_8(to, _mm_packus_epi16(narrow_e4m3(x.low), narrow_e4m3(x.high))); }

/// Of the sixteen codes of 4 bits that are at `shift` of words of 32: whole numbers, or those that `numbers` has.
inline Floats load_int4(const char* words, int shift) {
  const auto of_eight = [=](const char* from) {
    const __m256i high = _mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), 28 - shift);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(high, 28));
  };
  return {of_eight(words), of_eight(words + 32)};
}
inline Floats load_chosen(const float (&numbers)[16], const char* words, int shift) {
  const auto of_eight = [&](const char* from) {
    const __m256i high = _mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), 28 - shift);
    const __m256i code = _mm256_srli_epi32(high, 28);
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers), code),
                            _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers + 8), code), _mm256_castsi256_ps(high));
  };
  return {of_eight(words), of_eight(words + 32)};
}

/// Sixteen whole numbers of 32 bits, or 64 of 8 bits: four for each of sixteen columns.
struct Ints {
  __m256i low, high;
};

inline Ints whole(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Ints load_whole(const void* from) {
  const auto* halves = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}

/// Of 64 bytes the lower, or the upper, halves: from 0 to 15.
inline Ints low_halves(Ints bytes) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(bytes.low, mask), _mm256_and_si256(bytes.high, mask)};
}
inline Ints high_halves(Ints bytes) {
  return low_halves({_mm256_srli_epi16(bytes.low, 4), _mm256_srli_epi16(bytes.high, 4)});
}

/// What is added to each of the codes of 8 bits that are multiplied, which are signed otherwise.
#ifdef __AVXVNNI__
constexpr int32_t INT8_OFFSET = 128;
inline Ints with_offset(Ints codes) {
  const __m256i sign = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(codes.low, sign), _mm256_xor_si256(codes.high, sign)};
}
#else
constexpr int32_t INT8_OFFSET = 0;
inline Ints with_offset(Ints codes) { return codes; }
#endif

/// To each of sixteen sums four products, with codes of 8 bits and four numbers from -127 to 127.
inline Ints add_products(Ints sums, Ints codes, int32_t numbers) {
#ifdef __AVXVNNI__
  const __m256i x = _mm256_set1_epi32(numbers);
  return {_mm256_dpbusd_avx_epi32(sums.low, codes.low, x), _mm256_dpbusd_avx_epi32(sums.high, codes.high, x)};
#else
  const __m256i x = _mm256_set1_epi32(numbers), ones = _mm256_set1_epi16(1);
  // Two products are at most 2 * 128 * 127, which 16 bits hold.
  const auto add = [=](__m256i sum, __m256i code) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
  };
  return {add(sums.low, codes.low), add(sums.high, codes.high)};
#endif
}

/// The same for codes from 0 to 15, up to eight times between `begin_small` and `end_small`.
#ifdef __AVXVNNI__
inline Ints begin_small(Ints sums) { return sums; }
inline Ints add_small(Ints part, Ints codes, int32_t numbers) { return add_products(part, codes, numbers); }
inline Ints end_small(Ints, Ints part) { return part; }
#else
inline Ints begin_small(Ints) { return whole(0); }
inline Ints add_small(Ints part, Ints codes, int32_t numbers) {
  const __m256i x = _mm256_set1_epi32(numbers);
  // Eight times two products are at most 16 * 15 * 127, which 16 bits hold.
  return {_mm256_add_epi16(part.low, _mm256_maddubs_epi16(codes.low, x)),
          _mm256_add_epi16(part.high, _mm256_maddubs_epi16(codes.high, x))};
}
inline Ints end_small(Ints sums, Ints part) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(part.low, ones)),
          _mm256_add_epi32(sums.high, _mm256_madd_epi16(part.high, ones))};
}
#endif

/// As whole numbers of 8 bits, to nearest, ties to even; they are below 128.
inline void store_int8(int8_t* to, Floats x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
  const __m256i in_order = _mm256_permute4x64_epi64(words, 0xd8);
  store_8(to, _mm_packs_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1)));
}

inline Floats nearest(Floats x) {
  constexpr int MODE = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, MODE), _mm256_round_ps(x.high, MODE)};
}

/// x * 2 ** whole, for x in [0.5, 2) and whole numbers up to 127; 0 where that is denormal.
inline Floats times_power_of_2(Floats x, Floats whole) {
  const auto scale = [](__m256 value, __m256 exponent) {
    const __m256 least = _mm256_set1_ps(-126.0f);
    const __m256i power = _mm256_cvtps_epi32(_mm256_max_ps(exponent, least));
    const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(power, _mm256_set1_epi32(127)), 23);
    const __m256 scaled = _mm256_mul_ps(value, _mm256_castsi256_ps(bits));
    return _mm256_andnot_ps(_mm256_cmp_ps(exponent, least, _CMP_LT_OQ), scaled);
  };
  return {scale(x.low, whole.low), scale(x.high, whole.high)};
}

/// x in the lanes from `first` to below `end`, `other` in all others.
inline Floats keep_lanes(Floats x, int64_t first, int64_t end, Floats other) {
  const auto place = [](int64_t lane) { return _mm256_set1_epi32(std::clamp<int64_t>(lane, -1, 16)); };
  const auto keep = [&](__m256 kept, __m256 instead, __m256i lanes) {
    const __m256i seen =
        _mm256_andnot_si256(_mm256_cmpgt_epi32(place(first), lanes), _mm256_cmpgt_epi32(place(end), lanes));
    return _mm256_blendv_ps(instead, kept, _mm256_castsi256_ps(seen));
  };
  return {keep(x.low, other.low, _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0)),
          keep(x.high, other.high, _mm256_set_epi32(15, 14, 13, 12, 11, 10, 9, 8))};
}

/// `then` where x is below `limit`, else x.
inline Floats replace_below(Floats x, Floats limit, Floats then) {
  return {_mm256_blendv_ps(x.low, then.low, _mm256_cmp_ps(x.low, limit.low, _CMP_LT_OQ)),
          _mm256_blendv_ps(x.high, then.high, _mm256_cmp_ps(x.high, limit.high, _CMP_LT_OQ))};
}

/// Whether any lanes differ.
inline bool differ(Floats a, Floats b) {
  return _mm256_movemask_ps(
      _mm256_or_ps(_mm256_cmp_ps(a.low, b.low, _CMP_NEQ_UQ), _mm256_cmp_ps(a.high, b.high, _CMP_NEQ_UQ)));
}

/// One of a vector's lanes: eight are folded to four, two and one.
template <class Fold>
inline float folded(__m256 x, Fold fold) {
  const __m128 four = fold(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = fold(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(fold(two, _mm_movehdup_ps(two)));
}

/// Lanes n and n + 8 are added up, then n and n + 4, n + 2, n + 1.
inline float sum(Floats x) {
  return folded(_mm256_add_ps(x.low, x.high), [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
inline float largest(Floats x) {
  return folded(_mm256_max_ps(x.low, x.high), [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}

/// Lane n is the sum of x[n], in the order of sums of four lanes that AVX-512 has.
inline Floats sums_of(Floats (&x)[16]) {
  // Of eight vectors: in each quarter of sixteen lanes, sums of four lanes; then of quarters 0 and 1, 2 and 3, and
  // both.
  const auto of_eight = [](const Floats* y) {
    const auto of_quarters = [y](__m256 Floats::* half) {
      __m256 fours[2];
      for (int i = 0; i < 8; i += 4) {
        const __m256 a = y[i].*half, b = y[i + 1].*half, c = y[i + 2].*half, d = y[i + 3].*half;
        const __m256 ac = _mm256_add_ps(_mm256_unpacklo_ps(a, c), _mm256_unpackhi_ps(a, c));
        const __m256 bd = _mm256_add_ps(_mm256_unpacklo_ps(b, d), _mm256_unpackhi_ps(b, d));
        fours[i / 4] = _mm256_add_ps(_mm256_unpacklo_ps(ac, bd), _mm256_unpackhi_ps(ac, bd));
      }
      return _mm256_add_ps(_mm256_permute2f128_ps(fours[0], fours[1], 0x20),
                           _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
    };
    return _mm256_add_ps(of_quarters(&Floats::low), of_quarters(&Floats::high));
  };
  return {of_eight(x), of_eight(x + 8)};
}

/// An 8 by 8 matrix of 32-bit elements, its rows made columns.
inline void transpose(__m256 (&rows)[8]) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

/// A 16 by 16 matrix of 32-bit elements, its rows made columns.
inline void transpose(Floats (&rows)[16]) {
  __m256 quarters[2][2][8];
  for (int i = 0; i < 16; ++i) {
    quarters[i / 8][0][i % 8] = rows[i].low;
    quarters[i / 8][1][i % 8] = rows[i].high;
  }
  for (auto& half : quarters)
    for (auto& quarter : half) transpose(quarter);
  for (int i = 0; i < 16; ++i) rows[i] = {quarters[0][i / 8][i % 8], quarters[1][i / 8][i % 8]};
}

}  // namespace inflight
