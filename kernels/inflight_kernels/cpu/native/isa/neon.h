// NEON of any aarch64, with dot products of bytes where the compiler may use them: sixteen floats are four registers.
//
// BFDOT and BFMMLA are left out: they do not round as two fused multiply-adds do.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../formats.h"
#include "aarch64.h"

namespace inflight {

struct Floats {
  float32x4_t first, second, third, fourth;
};

/// Of 32 registers products of up to three rows keep 24 sums; see product_of.
constexpr int64_t MAX_ROWS_IN_VECTORS = 3, MAX_OF_FEW_ROWS = 3, MAX_ROWS_OF_INTEGERS = 3;
constexpr int64_t tiles_at_once(int64_t num_rows) { return num_rows == 1 ? 2 : 1; }
/// Whether registers have room for the totals of groups beside their sums; else they are in memory.
constexpr bool KEEPS_TOTALS = false;

/// A function of each quarter of some vectors. Lambdas, as a pointer to an intrinsic may be left to the linker.
template <class Vector = Floats, class Function, class... Vectors>
inline Vector by_quarters(Function function, const Vectors&... x) {
  return {function(x.first...), function(x.second...), function(x.third...), function(x.fourth...)};
}

inline Floats operator+(Floats a, Floats b) {
  return by_quarters([](auto x, auto y) { return x + y; }, a, b);
}
inline Floats operator-(Floats a, Floats b) {
  return by_quarters([](auto x, auto y) { return x - y; }, a, b);
}
inline Floats operator*(Floats a, Floats b) {
  return by_quarters([](auto x, auto y) { return x * y; }, a, b);
}
inline Floats operator/(Floats a, Floats b) {
  return by_quarters([](auto x, auto y) { return x / y; }, a, b);
}

inline Floats splat(float value) {
  const float32x4_t quarter = vdupq_n_f32(value);
  return {quarter, quarter, quarter, quarter};
}
inline float first_of(Floats x) { return vgetq_lane_f32(x.first, 0); }

/// It stays in registers, and is not read from memory again where it is used.
inline void hold(Floats& x) { asm("" : "+w"(x.first), "+w"(x.second), "+w"(x.third), "+w"(x.fourth)); }

/// a * b + c, a * b - c and c - a * b, rounded once.
inline Floats fma(Floats a, Floats b, Floats c) {
  return by_quarters([](auto x, auto y, auto z) { return vfmaq_f32(z, x, y); }, a, b, c);
}
inline Floats fms(Floats a, Floats b, Floats c) {
  return by_quarters([](auto x, auto y, auto z) { return vfmaq_f32(vnegq_f32(z), x, y); }, a, b, c);
}
inline Floats fnma(Floats a, Floats b, Floats c) {
  return by_quarters([](auto x, auto y, auto z) { return vfmsq_f32(z, x, y); }, a, b, c);
}

/// `b` where one of them is no number, which FMIN and FMAX would give, or where both are zeros. Of equal operands FMAX
/// flushes denormals, as comparisons have seen them, if they are flushed.
inline float32x4_t lower_of(float32x4_t a, float32x4_t b) {
  const float32x4_t chosen = vbslq_f32(vcltq_f32(a, b), a, b);
  return vmaxq_f32(chosen, chosen);
}
inline float32x4_t higher_of(float32x4_t a, float32x4_t b) {
  const float32x4_t chosen = vbslq_f32(vcgtq_f32(a, b), a, b);
  return vmaxq_f32(chosen, chosen);
}
inline Floats min(Floats a, Floats b) {
  return by_quarters([](auto x, auto y) { return lower_of(x, y); }, a, b);
}
inline Floats max(Floats a, Floats b) {
  return by_quarters([](auto x, auto y) { return higher_of(x, y); }, a, b);
}

inline Floats load(const float* from) {
  return {vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
}
inline void store(float* to, Floats x) {
  vst1q_f32(to, x.first);
  vst1q_f32(to + 4, x.second);
  vst1q_f32(to + 8, x.third);
  vst1q_f32(to + 12, x.fourth);
}

/// Sixteen of 16 bits, made of four floats each, or floats made of them.
template <class Widen>
inline Floats load_halves(const uint16_t* from, Widen widen) {
  return {widen(vld1_u16(from)), widen(vld1_u16(from + 4)), widen(vld1_u16(from + 8)), widen(vld1_u16(from + 12))};
}
template <class Narrow>
inline void store_halves(uint16_t* to, Floats x, Narrow narrow) {
  vst1q_u16(to, vcombine_u16(narrow(x.first), narrow(x.second)));
  vst1q_u16(to + 8, vcombine_u16(narrow(x.third), narrow(x.fourth)));
}

inline float32x4_t widen_bf16(uint16x4_t bits) { return vreinterpretq_f32_u32(vshll_n_u16(bits, 16)); }

/// To nearest, ties to even, as torch rounds, but for numbers below 2 ** -126, which become 0.
inline uint16x4_t narrow_bf16(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), high = vshrq_n_u32(bits, 16);
  const uint32x4_t half = vaddq_u32(vdupq_n_u32(0x7fff), vandq_u32(high, vdupq_n_u32(1)));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, half), 16);
  const uint32x4_t magnitude = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
  const uint32x4_t is_nan = vcgtq_u32(magnitude, vdupq_n_u32(0x7f800000));
  const uint32x4_t is_denormal = vcltq_u32(magnitude, vdupq_n_u32(0x00800000));
  const uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40)), zero = vandq_u32(high, vdupq_n_u32(0x8000));
  return vmovn_u32(vbslq_u32(is_denormal, zero, vbslq_u32(is_nan, quiet, rounded)));
}

inline Floats load(const Bf16* from) {
  return load_halves(&from->bits, [](auto x) { return widen_bf16(x); });
}
inline void store(Bf16* to, Floats x) {
  store_halves(&to->bits, x, [](auto y) { return narrow_bf16(y); });
}

inline float32x4_t widen_f16(uint16x4_t bits) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }
inline uint16x4_t narrow_f16(float32x4_t x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

inline Floats load(const F16* from) {
  return load_halves(&from->bits, [](auto x) { return widen_f16(x); });
}
inline void store(F16* to, Floats x) {
  store_halves(&to->bits, x, [](auto y) { return narrow_f16(y); });
}

/// What the format keeps of them.
inline Floats rounded_to(const Bf16*, Floats x) {
  return by_quarters([](auto y) { return widen_bf16(narrow_bf16(y)); }, x);
}
inline Floats rounded_to(const F16*, Floats x) {
  return by_quarters([](auto y) { return widen_f16(narrow_f16(y)); }, x);
}

/// The even, or the odd, element of sixteen pairs.
inline Floats even_of_pairs(const Bf16* pairs) {
  const auto even = [](const Bf16* four) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(&four->bits)), 16));
  };
  return {even(pairs), even(pairs + 8), even(pairs + 16), even(pairs + 24)};
}
inline Floats odd_of_pairs(const Bf16* pairs) {
  const auto odd = [](const Bf16* four) {
    const uint32x4_t words = vreinterpretq_u32_u16(vld1q_u16(&four->bits));
    return vreinterpretq_f32_u32(vandq_u32(words, vdupq_n_u32(0xffff0000)));
  };
  return {odd(pairs), odd(pairs + 8), odd(pairs + 16), odd(pairs + 24)};
}

/// Sixteen pairs of one element of each.
inline void interleave(const Bf16* even, const Bf16* odd, Bf16* pairs) {
  for (int i = 0; i < 16; i += 8)
    vst2q_u16(&pairs[2 * i].bits, uint16x8x2_t{{vld1q_u16(&even[i].bits), vld1q_u16(&odd[i].bits)}});
}

/// Sixteen pairs of one element of each, which hold nothing but what bfloat16 keeps.
inline void store_pairs(Bf16* to, Floats even, Floats odd) {
  const auto joined = [](float32x4_t lower, float32x4_t upper) {
    return vreinterpretq_u16_u32(vsriq_n_u32(vreinterpretq_u32_f32(upper), vreinterpretq_u32_f32(lower), 16));
  };
  vst1q_u16(&to[0].bits, joined(even.first, odd.first));
  vst1q_u16(&to[8].bits, joined(even.second, odd.second));
  vst1q_u16(&to[16].bits, joined(even.third, odd.third));
  vst1q_u16(&to[24].bits, joined(even.fourth, odd.fourth));
}

inline int8x16_t load_bytes(const void* from) { return vld1q_s8(static_cast<const int8_t*>(from)); }

/// Sixteen codes of 8 bits: whole numbers, and fp8 (1, 4 and 3 bits) times 2 ** -8.
inline Floats load_int8(const char* from) {
  const int8x16_t codes = load_bytes(from);
  const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}
inline Floats load_fp8(const char* from) {
  const int8x16_t codes = load_bytes(from);
  const auto halves = [](int16x8_t words) { return vandq_u16(vreinterpretq_u16_s16(words), vdupq_n_u16(0xbf80)); };
  const uint16x8_t low = halves(vshll_n_s8(vget_low_s8(codes), 7)), high = halves(vshll_high_n_s8(codes, 7));
  return {widen_f16(vget_low_u16(low)), widen_f16(vget_high_u16(low)), widen_f16(vget_low_u16(high)),
          widen_f16(vget_high_u16(high))};
}

/// Eight numbers of fp8 as a format of 16 bits has them.
template <class Format>
inline uint16x8_t halves_of(const E4m3* from) {
  using As = Fp8As<Format>;
  const uint16x8_t words = vmovl_u8(vld1_u8(&from->bits)), magnitudes = vandq_u16(words, vdupq_n_u16(0x7f));
  const uint16x8_t normal = vaddq_u16(vshlq_n_u16(magnitudes, As::SHIFT), vdupq_n_u16(As::BIAS));
  // The numbers of both bytes of SMALL[magnitude].
  const uint16x8_t bytes = vmlaq_u16(vdupq_n_u16(0x0100), magnitudes, vdupq_n_u16(0x0202));
  const uint8x16_t table = vreinterpretq_u8_u16(vld1q_u16(As::SMALL));
  const uint16x8_t small = vreinterpretq_u16_u8(vqtbl1q_u8(table, vreinterpretq_u8_u16(bytes)));
  const uint16x8_t numbers = vbslq_u16(vcgtq_u16(magnitudes, vdupq_n_u16(7)), normal, small);
  const uint16x8_t is_nan = vceqq_u16(magnitudes, vdupq_n_u16(0x7f));
  const uint16x8_t signs = vshlq_n_u16(vshrq_n_u16(words, 7), 15);
  return vorrq_u16(vbslq_u16(is_nan, vdupq_n_u16(As::NO_NUMBER), numbers), signs);
}
/// Thirty-two, what is no number too.
template <class Format>
inline void widen(const E4m3* from, Format* to) {
  for (int i = 0; i < 32; i += 8) vst1q_u16(&to[i].bits, halves_of<Format>(from + i));
}
inline void widen(const E4m3* from, float* to) {
  for (int i = 0; i < 32; i += 8) {
    const uint16x8_t halves = halves_of<Bf16>(from + i);
    vst1q_f32(to + i, widen_bf16(vget_low_u16(halves)));
    vst1q_f32(to + i + 4, widen_bf16(vget_high_u16(halves)));
  }
}
/// Sixteen bits with the code of each number up to 448: to nearest, ties to even, as torch rounds. What is none stays
/// none.
inline uint16x4_t narrow_e4m3(float32x4_t x) {
  // Neighbours are an eighth of the power of 2 below them apart, but not less than 2 ** -9. To 1.5 * 2 ** 23 times that
  // no more than whole neighbours can be added.
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const float32x4_t exponent = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0x7f800000)));
  const float32x4_t shift = vmulq_n_f32(higher_of(vdupq_n_f32(0x1p-6f), exponent), 0x1.8p20f);
  const float32x4_t kept = vmulq_n_f32(vsubq_f32(vaddq_f32(x, shift), shift), 0x1p-8f);
  // The inverse of load_fp8, but for the sign of what becomes 0.
  const uint32x4_t sign = vandq_u32(bits, vdupq_n_u32(0x80000000));
  const uint16x4_t halves = narrow_f16(vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(kept), sign)));
  const uint16x4_t magnitudes = vand_u16(halves, vdup_n_u16(0x7fff)), nan = vdup_n_u16(0x3f80);
  const uint16x4_t codes = vshr_n_u16(vmin_u16(magnitudes, nan), 7);
  return vorr_u16(codes, vand_u16(vshr_n_u16(halves, 8), vdup_n_u16(0x80)));
}
inline void store(E4m3* to, Floats x) {
  const uint16x8_t low = vcombine_u16(narrow_e4m3(x.first), narrow_e4m3(x.second));
  vst1q_u8(&to->bits, vmovn_high_u16(vmovn_u16(low), vcombine_u16(narrow_e4m3(x.third), narrow_e4m3(x.fourth))));
}

/// Sixteen whole numbers of 32 bits, or 64 of 8 bits: four for each of sixteen columns.
struct Ints {
  int32x4_t first, second, third, fourth;
};

inline Ints whole(int32_t value) {
  const int32x4_t quarter = vdupq_n_s32(value);
  return {quarter, quarter, quarter, quarter};
}
inline Floats to_floats(Ints x) {
  return by_quarters([](auto y) { return vcvtq_f32_s32(y); }, x);
}
inline Ints load_whole(const void* from) {
  const auto quarter = [from](int n) {
    return vreinterpretq_s32_s8(load_bytes(static_cast<const int8_t*>(from) + 16 * n));
  };
  return {quarter(0), quarter(1), quarter(2), quarter(3)};
}

/// Of the sixteen codes of 4 bits that are at `shift` of words of 32: whole numbers, or those that `numbers` has.
inline Floats load_int4(const char* words, int shift) {
  const auto decode = [shift](int32x4_t word) {
    return vcvtq_f32_s32(vshrq_n_s32(vreinterpretq_s32_u32(vreinterpretq_u32_s32(word) << (28 - shift)), 28));
  };
  return by_quarters(decode, load_whole(words));
}
inline Floats load_chosen(const float (&numbers)[16], const char* words, int shift) {
  const uint8x16x4_t table = vld1q_u8_x4(reinterpret_cast<const uint8_t*>(numbers));
  const auto decode = [&](int32x4_t word) {
    const uint32x4_t code = vandq_u32(vreinterpretq_u32_s32(word) >> shift, vdupq_n_u32(15));
    // The numbers of all four bytes of a number.
    const uint32x4_t bytes = vmlaq_u32(vdupq_n_u32(0x03020100), code, vdupq_n_u32(0x04040404));
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)));
  };
  return by_quarters(decode, load_whole(words));
}

/// Of 64 bytes the lower, or the upper, halves: from 0 to 15.
inline Ints low_halves(Ints bytes) {
  return by_quarters<Ints>([](int32x4_t x) { return vandq_s32(x, vdupq_n_s32(0x0f0f0f0f)); }, bytes);
}
inline Ints high_halves(Ints bytes) {
  const auto upper = [](int32x4_t x) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), 4)); };
  return by_quarters<Ints>(upper, bytes);
}

/// What is added to each of the codes of 8 bits that are multiplied, which are signed otherwise.
constexpr int32_t INT8_OFFSET = 0;
inline Ints with_offset(Ints codes) { return codes; }

#ifdef __ARM_FEATURE_DOTPROD
/// To each of sixteen sums four products, with codes of 8 bits and four numbers from -127 to 127.
inline Ints add_products(Ints sums, Ints codes, int32_t numbers) {
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(numbers));
  return by_quarters<Ints>([x](int32x4_t sum, int32x4_t code) { return vdotq_s32(sum, vreinterpretq_s8_s32(code), x); },
                           sums, codes);
}

/// The same for codes from 0 to 15, up to eight times between `begin_small` and `end_small`.
inline Ints begin_small(Ints sums) { return sums; }
inline Ints add_small(Ints part, Ints codes, int32_t numbers) { return add_products(part, codes, numbers); }
inline Ints end_small(Ints, Ints part) { return part; }
#else
/// Eight sums of two products each, which are at most 2 * 128 * 127: 16 bits hold that.
inline int16x8_t sums_of_two(int32x4_t codes, int8x16_t numbers) {
  const int8x16_t bytes = vreinterpretq_s8_s32(codes);
  return vpaddq_s16(vmull_s8(vget_low_s8(bytes), vget_low_s8(numbers)), vmull_high_s8(bytes, numbers));
}

/// To each of sixteen sums four products, with codes of 8 bits and four numbers from -127 to 127.
inline Ints add_products(Ints sums, Ints codes, int32_t numbers) {
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(numbers));
  const auto add = [x](int32x4_t sum, int32x4_t code) { return vpadalq_s16(sum, sums_of_two(code, x)); };
  return by_quarters<Ints>(add, sums, codes);
}

/// The same for codes from 0 to 15, up to eight times between `begin_small` and `end_small`.
inline Ints begin_small(Ints) { return whole(0); }
inline Ints add_small(Ints part, Ints codes, int32_t numbers) {
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(numbers));
  // Eight times two products are at most 16 * 15 * 127, which 16 bits hold.
  const auto add = [x](int32x4_t pairs, int32x4_t code) {
    return vreinterpretq_s32_s16(vaddq_s16(vreinterpretq_s16_s32(pairs), sums_of_two(code, x)));
  };
  return by_quarters<Ints>(add, part, codes);
}
inline Ints end_small(Ints sums, Ints part) {
  const auto add = [](int32x4_t sum, int32x4_t pairs) { return vpadalq_s16(sum, vreinterpretq_s16_s32(pairs)); };
  return by_quarters<Ints>(add, sums, part);
}
#endif

/// As whole numbers of 8 bits, to nearest, ties to even; they are below 128.
inline void store_int8(int8_t* to, Floats x) {
  const Ints wholes = by_quarters<Ints>([](auto y) { return vcvtnq_s32_f32(y); }, x);
  const int16x8_t low = vmovn_high_s32(vmovn_s32(wholes.first), wholes.second);
  const int16x8_t high = vmovn_high_s32(vmovn_s32(wholes.third), wholes.fourth);
  vst1q_s8(to, vmovn_high_s16(vmovn_s16(low), high));
}

inline Floats nearest(Floats x) {
  return by_quarters([](auto y) { return vrndnq_f32(y); }, x);
}

/// x * 2 ** whole, for x in [0.5, 2) and whole numbers up to 127; 0 where that is denormal.
inline Floats times_power_of_2(Floats x, Floats whole) {
  const auto scale = [](float32x4_t value, float32x4_t exponent) {
    const float32x4_t least = vdupq_n_f32(-126.0f);
    const int32x4_t power = vcvtnq_s32_f32(higher_of(exponent, least));
    const int32x4_t bits = vshlq_n_s32(vaddq_s32(power, vdupq_n_s32(127)), 23);
    const float32x4_t scaled = vmulq_f32(value, vreinterpretq_f32_s32(bits));
    return vbslq_f32(vcltq_f32(exponent, least), vdupq_n_f32(0.0f), scaled);
  };
  return by_quarters(scale, x, whole);
}

/// x in the lanes from `first` to below `end`, `other` in all others.
inline Floats keep_lanes(Floats x, int64_t first, int64_t end, Floats other) {
  const auto place = [](int64_t lane) { return vdupq_n_s32(std::clamp<int64_t>(lane, -1, 16)); };
  const auto keep = [&](float32x4_t kept, float32x4_t instead, int32x4_t lanes) {
    return vbslq_f32(vandq_u32(vcgeq_s32(lanes, place(first)), vcltq_s32(lanes, place(end))), kept, instead);
  };
  return {keep(x.first, other.first, int32x4_t{0, 1, 2, 3}), keep(x.second, other.second, int32x4_t{4, 5, 6, 7}),
          keep(x.third, other.third, int32x4_t{8, 9, 10, 11}), keep(x.fourth, other.fourth, int32x4_t{12, 13, 14, 15})};
}

/// `then` where x is below `limit`, else x.
inline Floats replace_below(Floats x, Floats limit, Floats then) {
  return by_quarters(
      [](auto kept, auto bound, auto instead) { return vbslq_f32(vcltq_f32(kept, bound), instead, kept); }, x, limit,
      then);
}

/// Whether any lanes differ.
inline bool differ(Floats a, Floats b) {
  const uint32x4_t low = vandq_u32(vceqq_f32(a.first, b.first), vceqq_f32(a.second, b.second));
  const uint32x4_t high = vandq_u32(vceqq_f32(a.third, b.third), vceqq_f32(a.fourth, b.fourth));
  return vminvq_u32(vandq_u32(low, high)) == 0;
}

/// One of a vector's lanes: sixteen are folded to eight, four, two and one.
template <class Fold>
inline float folded(Floats x, Fold fold) {
  const float32x4_t four = fold(fold(x.first, x.third), fold(x.second, x.fourth));
  const float32x4_t two = fold(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(fold(two, vdupq_laneq_f32(two, 1)), 0);
}

/// Lanes n and n + 8 are added up, then n and n + 4, n + 2, n + 1.
inline float sum(Floats x) {
  return folded(x, [](auto a, auto b) { return a + b; });
}
inline float largest(Floats x) {
  return folded(x, [](auto a, auto b) { return higher_of(a, b); });
}

/// Four rows of four elements, made columns.
inline Floats transposed(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
  const float32x4_t low_ac = vzip1q_f32(a, c), high_ac = vzip2q_f32(a, c);
  const float32x4_t low_bd = vzip1q_f32(b, d), high_bd = vzip2q_f32(b, d);
  return {vzip1q_f32(low_ac, low_bd), vzip2q_f32(low_ac, low_bd), vzip1q_f32(high_ac, high_bd),
          vzip2q_f32(high_ac, high_bd)};
}

/// Lane n is the sum of x[n], in the order of sums of four lanes that AVX-512 has.
inline Floats sums_of(Floats (&x)[16]) {
  const auto of_four = [](const Floats* y) {
    const auto of_quarters = [y](float32x4_t Floats::* quarter) {
      const Floats lanes = transposed(y[0].*quarter, y[1].*quarter, y[2].*quarter, y[3].*quarter);
      return (lanes.first + lanes.third) + (lanes.second + lanes.fourth);
    };
    return (of_quarters(&Floats::first) + of_quarters(&Floats::second)) +
           (of_quarters(&Floats::third) + of_quarters(&Floats::fourth));
  };
  return {of_four(x), of_four(x + 4), of_four(x + 8), of_four(x + 12)};
}

/// A 16 by 16 matrix of 32-bit elements, its rows made columns.
inline void transpose(Floats (&rows)[16]) {
  Floats blocks[4][4];
  for (int i = 0; i < 4; ++i) {
    const auto block = [&](float32x4_t Floats::* quarter) {
      const Floats* const four = rows + 4 * i;
      return transposed(four[0].*quarter, four[1].*quarter, four[2].*quarter, four[3].*quarter);
    };
    blocks[i][0] = block(&Floats::first);
    blocks[i][1] = block(&Floats::second);
    blocks[i][2] = block(&Floats::third);
    blocks[i][3] = block(&Floats::fourth);
  }
  for (int j = 0; j < 4; ++j) {
    const auto row = [&](float32x4_t Floats::* column) {
      return Floats{blocks[0][j].*column, blocks[1][j].*column, blocks[2][j].*column, blocks[3][j].*column};
    };
    rows[4 * j] = row(&Floats::first);
    rows[4 * j + 1] = row(&Floats::second);
    rows[4 * j + 2] = row(&Floats::third);
    rows[4 * j + 3] = row(&Floats::fourth);
  }
}

}  // namespace inflight
