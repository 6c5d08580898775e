// Elements as numbers of 8 bits, times a scale.
#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace inflight {

constexpr float LARGEST_FP8 = 448.0f, LARGEST_INT8 = 127.0f;
/// Groups of smaller numbers become zeros, with the scale 1.
constexpr float SMALLEST_BOUND = 0x1p-100f;

/// y = x / scale as fp8 has it: 448 and no more, and to nearest.
inline void quantize(const Element* x, int64_t size, float scale, E4m3* y) {
  const Floats inverse = splat(1.0f / scale), largest = splat(LARGEST_FP8), least = splat(-LARGEST_FP8);
  // Where x is no number, min and max give their second operand, so that it stays none.
  for (int64_t i = 0; i < size; i += 16) store(y + i, max(least, min(largest, load(x + i) * inverse)));
}

/// Elements `first` to below `end`, a multiple of 16 of them, as whole numbers; `at(i)` is where those from i on go.
/// They are rounded as quantization/reference.py rounds a row: the largest magnitude becomes 127. Adds them up in
/// `total`. Returns their scale, NaN where an element is not finite.
template <class At>
inline float quantize(const Element* x, int64_t first, int64_t end, At at, Floats& total) {
  Floats largest_lanes = splat(0.0f), poison = splat(0.0f);
  for (int64_t i = first; i < end; i += 16) {
    const Floats some = load(x + i);
    largest_lanes = max(largest_lanes, max(some, splat(0.0f) - some));
    poison = fma(some, splat(0.0f), poison);
  }
  const float bound = largest(largest_lanes), scale = bound < SMALLEST_BOUND ? 1.0f : bound / LARGEST_INT8;
  const Floats inverse = splat(1.0f / scale);
  for (int64_t i = first; i < end; i += 16) {
    const Floats value = nearest(load(x + i) * inverse);
    store_int8(at(i), value);
    total = total + value;
  }
  return scale + sum(poison);
}

/// The heads of one token, `size` elements, each with a scale of its own.
inline void quantize_heads(const Element* x, int64_t size, int64_t head_dim, int8_t* values, float* scales) {
  const auto at = [=](int64_t i) { return values + i; };
  for (int64_t i = 0; i < size; i += head_dim) {
    Floats total = splat(0.0f);
    scales[i / head_dim] = quantize(x, i, i + head_dim, at, total);
  }
}

}  // namespace inflight
