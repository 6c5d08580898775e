// The formats of numbers: of weights, activations and cache.
#pragma once

#include <cstdint>

namespace inflight {

struct Bf16 {
  uint16_t bits;
};

/// What a program computes in: its activations, plain weights and cache.
using Element = Bf16;

}  // namespace inflight
