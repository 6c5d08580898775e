// Codes: weights of 4 or 8 bits, as panels of them lie in memory, and how a product reads them.
//
// A panel of codes is laid out like one of elements: steps of two tiles of 16 lines, a line for two rows. A line of 8
// bits has the 16 codes of row 2r before those of row 2r + 1. Of 4 bits four lines share 64 bytes: 16 words of 32 bits,
// one for each column, whose lower half has row 2r of the four lines, lowest bits first, and its upper half row 2r + 1.
//
// Every code stands for a number that bfloat16 and float16 hold exactly (NF4's are rounded to the elements). So
// products multiply codes without rounding them, and what a group of them shares, its scale, multiplies their sum.
#pragma once

#include <cstring>
#include <type_traits>

#include "panels.h"

namespace inflight {

/// Whole numbers from -128 to 127.
struct Int8 {
  static constexpr int BITS = 8;
  static Floats decode(const char* codes) { return load_int8(codes); }
};

/// 1 sign, 4 exponent and 3 mantissa bits. What is read is 2 ** -8 of what they stand for: as float16 has it.
struct Fp8 {
  static constexpr int BITS = 8;
  static Floats decode(const char* codes) { return load_fp8(codes); }
};

/// Whole numbers from -8 to 7.
struct Int4 {
  static constexpr int BITS = 4;
  static constexpr float NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
};

/// 1 sign, 2 exponent and 1 mantissa bit.
struct Fp4 {
  static constexpr int BITS = 4;
  static constexpr float NUMBERS[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
};

/// The levels of bitsandbytes' NormalFloat (Dettmers et al. 2023, arXiv 2305.14314, appendix E).
struct Nf4 {
  static constexpr int BITS = 4;
  static constexpr float NUMBERS[16] = {-1.0f,
                                        -0.6961928009986877f,
                                        -0.5250730514526367f,
                                        -0.39491748809814453f,
                                        -0.28444138169288635f,
                                        -0.18477343022823334f,
                                        -0.09105003625154495f,
                                        0.0f,
                                        0.07958029955625534f,
                                        0.16093020141124725f,
                                        0.24611230194568634f,
                                        0.33791524171829224f,
                                        0.44070982933044434f,
                                        0.5626170039176941f,
                                        0.7229568362236023f,
                                        1.0f};
};

/// What elements keep of the numbers of codes of 4 bits; also as bits of bfloat16, twice.
template <class Code>
struct Kept {
  alignas(64) float numbers[16];
  alignas(64) uint16_t pairs[32];

  Kept() {
    store(numbers, rounded(load(Code::NUMBERS)));
    Bf16 halves[16];
    store(halves, load(Code::NUMBERS));
    for (int i = 0; i < 32; ++i) pairs[i] = halves[i % 16].bits;
  }
};
template <class Code>
inline const Kept<Code> KEPT;

/// How a product reads panels of them.
template <class Code, int BITS = Code::BITS>
struct Coded;

template <class Code>
struct Coded<Code, 8> {
  static constexpr int64_t STEP_BYTES = STEP;
  static Floats even(const char* step, int tile, int r) { return Code::decode(step + TILE * tile + LINE * r); }
  static Floats odd(const char* step, int tile, int r) { return Code::decode(step + TILE * tile + LINE * r + 16); }
#ifdef __AVX512BF16__
  static __m512i pairs(const char* step, int tile, int r) { return joined(even(step, tile, r), odd(step, tile, r)); }
#endif
  /// Of one row and column.
  static float number(const char* step, int tile, int row, int column) {
    float some[16];
    store(some, row % 2 ? odd(step, tile, row / 2) : even(step, tile, row / 2));
    return some[column];
  }
  static void prefetch(const char* step, int tile, int r, int64_t ahead) {
    if (r % 2 == 0) prefetch_lines(step + TILE * tile + LINE * r + ahead, 1);
  }
};

template <class Code>
struct Coded<Code, 4> {
  static constexpr int64_t STEP_BYTES = STEP / 2;
  static const char* words(const char* step, int tile, int r) { return step + TILE / 2 * tile + 64 * (r / 4); }
  static Floats even(const char* step, int tile, int r) { return numbers_at(words(step, tile, r), 4 * (r % 4)); }
  static Floats odd(const char* step, int tile, int r) { return numbers_at(words(step, tile, r), 16 + 4 * (r % 4)); }
#ifdef __AVX512BF16__
  static __m512i pairs(const char* step, int tile, int r) {
    return load_chosen_pairs(KEPT<Code>.pairs, words(step, tile, r), 4 * (r % 4));
  }
#endif
  /// Of one row and column, as it is and not as elements keep it.
  static float number(const char* step, int tile, int row, int column) {
    uint32_t word;
    std::memcpy(&word, words(step, tile, row / 2) + 4 * column, sizeof word);
    return Code::NUMBERS[word >> (row % 2 * 16 + row / 2 % 4 * 4) & 15];
  }
  static void prefetch(const char* step, int tile, int r, int64_t ahead) {
    if (r % 4 == 0) prefetch_lines(words(step, tile, r) + ahead, 1);
  }

 private:
  static Floats numbers_at(const char* words, int shift) {
    if constexpr (std::is_same_v<Code, Int4>)
      return load_int4(words, shift);
    else
      return load_chosen(KEPT<Code>.numbers, words, shift);
  }
};

}  // namespace inflight
