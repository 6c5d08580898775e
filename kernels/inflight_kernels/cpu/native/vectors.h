// What is computed of sixteen floats at a time, the same by all instructions of isa/.
#pragma once

#include "isa/isa.h"

namespace inflight {

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }
inline int64_t round_up(int64_t value, int64_t multiple) { return ceil_div(value, multiple) * multiple; }

inline Floats rounded_to(const float*, Floats x) { return x; }

/// What an element keeps of them.
inline Floats rounded(Floats x) { return rounded_to(static_cast<const Element*>(nullptr), x); }

/// 2 ** x within 3e-6 of it, for x up to 127; 0 far below -126.
inline Floats exp2(Floats x) {
  const Floats whole = nearest(x), part = x - whole;
  // The Taylor series of exp(part * ln 2), part in [-0.5, 0.5].
  Floats sum = splat(1.3333558e-3f);
  sum = fma(sum, part, splat(9.6181291e-3f));
  sum = fma(sum, part, splat(5.5504109e-2f));
  sum = fma(sum, part, splat(2.4022651e-1f));
  sum = fma(sum, part, splat(6.9314718e-1f));
  sum = fma(sum, part, splat(1.0f));
  return times_power_of_2(sum, whole);
}

constexpr float LOG2_E = 1.44269504f;

inline Floats silu(Floats x) {
  // Where x is no number, min gives its second operand: x, so that it stays none.
  const Floats decay = exp2(min(splat(127.0f), x * splat(-LOG2_E)));
  return x / (decay + splat(1.0f));
}

}  // namespace inflight
