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

/// Within 2e-6 of it; 0 of 0, and 1 and -1 far from it.
inline Floats tanh(Floats x) {
  // Where x is no number, min gives its second operand.
  const Floats growth = exp2(min(splat(127.0f), x * splat(2 * LOG2_E)));
  return splat(1.0f) - splat(2.0f) / (growth + splat(1.0f));
}

inline Floats silu(Floats x) {
  // Where x is no number, min gives its second operand: x, so that it stays none.
  const Floats decay = exp2(min(splat(127.0f), x * splat(-LOG2_E)));
  return x / (decay + splat(1.0f));
}

/// The error function within 4e-7 of it: x times a quotient of polynomials of x ** 2, a minimax fit of erf(x) / x up to
/// the limit, at which the result is 1, as that of the function is when rounded to float32.
inline Floats erf(Floats x) {
  const Floats limit = splat(3.93f), kept = max(splat(0.0f) - limit, min(limit, x)), square = kept * kept;
  Floats above = splat(2.0259058e-6f);
  above = fma(above, square, splat(2.8468593e-4f));
  above = fma(above, square, splat(3.8081151e-3f));
  above = fma(above, square, splat(5.2875303e-2f));
  above = fma(above, square, splat(1.9154935e-1f));
  above = fma(above, square, splat(1.1283791f));
  Floats below = splat(3.7831684e-5f);
  below = fma(below, square, splat(1.1707130e-3f));
  below = fma(below, square, splat(1.5054998e-2f));
  below = fma(below, square, splat(1.1455921e-1f));
  below = fma(below, square, splat(5.0308883e-1f));
  below = fma(below, square, splat(1.0f));
  return kept * above / below;
}

inline Floats sigmoid(Floats x) {
  // Where x is no number, min and max give their second operand, so that it stays none.
  const Floats decay = exp2(max(splat(-1000.0f), min(splat(127.0f), x * splat(-LOG2_E))));
  return splat(1.0f) / (decay + splat(1.0f));
}

/// log(1 + exp(x)) within 4e-6 of it, also where that is small.
inline Floats softplus(Floats x) {
  // Where x is no number, max gives its second operand, so that it stays none.
  const Floats above = max(splat(0.0f), x), magnitude = max(x, splat(0.0f) - x);
  const Floats growth = exp2(max(splat(-1000.0f), magnitude * splat(-LOG2_E)));
  // log(1 + growth) is twice the inverse hyperbolic tangent of growth / (2 + growth), which is a third at most.
  const Floats part = growth / (growth + splat(2.0f)), square = part * part;
  Floats sum = splat(2.0f / 13);
  sum = fma(sum, square, splat(2.0f / 11));
  sum = fma(sum, square, splat(2.0f / 9));
  sum = fma(sum, square, splat(2.0f / 7));
  sum = fma(sum, square, splat(2.0f / 5));
  sum = fma(sum, square, splat(2.0f / 3));
  sum = fma(sum, square, splat(2.0f));
  return fma(sum, part, above);
}

}  // namespace inflight
