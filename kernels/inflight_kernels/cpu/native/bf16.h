// The type of weights, activations and cache.
#pragma once

#include <cstdint>

namespace inflight {

struct Bf16 {
  uint16_t bits;
};

}  // namespace inflight
