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

#ifdef INFLIGHT_ELEMENT
/// What a program computes in: its activations, its plain weights and its cache. A library is compiled for one of
/// float, F16 and Bf16.
using Element = INFLIGHT_ELEMENT;
#endif

}  // namespace inflight
