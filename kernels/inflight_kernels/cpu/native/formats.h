// The formats of numbers in memory. Arithmetic is in float32, whatever they are.
#pragma once

#include <cstdint>

namespace inflight {

struct Bf16 {
  uint16_t bits;
};

/// IEEE 754's binary16.
struct F16 {
  uint16_t bits;
};

/// 1 sign, 4 exponent and 3 mantissa bits, up to 448, no infinity: torch's float8_e4m3fn.
struct E4m3 {
  uint8_t bits;
};

/// The same numbers in a format of 16 bits: SMALL has those of exponent 0, and of all others the lower 7 bits go to the
/// left and the exponent grows.
template <class Format>
struct Fp8As;
template <>
struct Fp8As<Bf16> {
  static constexpr int SHIFT = 4, BIAS = 0x3c00, NO_NUMBER = 0x7fc0;
  static constexpr uint16_t SMALL[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
};
template <>
struct Fp8As<F16> {
  static constexpr int SHIFT = 7, BIAS = 0x2000, NO_NUMBER = 0x7e00;
  static constexpr uint16_t SMALL[8] = {0, 0x1800, 0x1c00, 0x1e00, 0x2000, 0x2100, 0x2200, 0x2300};
};

#ifdef INFLIGHT_ELEMENT
/// What a program computes in: its activations and its plain weights. A library is compiled for one of
/// float, F16 and Bf16.
using Element = INFLIGHT_ELEMENT;
#endif

}  // namespace inflight
