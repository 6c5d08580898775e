// What stands between the products of a feed-forward layer (activation/kinds.py says what each of them is).
#pragma once

#include <type_traits>

#include "operation_fields.h"
#include "vectors.h"

namespace inflight {

inline Floats gelu(Floats x) { return x * splat(0.5f) * (splat(1.0f) + erf(x * splat(0.70710678f))); }

/// With (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)).
inline Floats gelu_tanh(Floats x) {
  // 2 sqrt(2 / pi) log2(e), and 0.044715 times that.
  const Floats exponent = x * fnma(x * x, splat(0.102943240f), splat(-2.30220820f));
  return x / (exp2(max(splat(-127.0f), min(splat(127.0f), exponent))) + splat(1.0f));
}

inline Floats clamped_swiglu(Floats gate, Floats up) {
  const Floats largest = splat(7.0f), kept = min(largest, gate);
  const Floats decay = exp2(min(splat(127.0f), kept * splat(-1.702f * LOG2_E)));
  return kept / (decay + splat(1.0f)) * (max(splat(-7.0f), min(largest, up)) + splat(1.0f));
}

/// f(x), of layers with a gate or without one.
template <Activation ACTIVATION>
inline Floats activated(Floats x) {
  if constexpr (ACTIVATION == Activation::SILU) return silu(x);
  if constexpr (ACTIVATION == Activation::GELU) return gelu(x);
  if constexpr (ACTIVATION == Activation::GELU_TANH) return gelu_tanh(x);
  static_assert(ACTIVATION != Activation::CLAMPED_SWIGLU, "it has a gate");
  // Where x is no number, max gives its second operand.
  const Floats kept = max(splat(0.0f), x);
  return ACTIVATION == Activation::RELU_SQUARED ? kept * kept : kept;
}

/// f(gate) * up of rounded numbers, to be rounded.
template <Activation ACTIVATION>
inline Floats gated(Floats gate, Floats up) {
  if constexpr (ACTIVATION == Activation::CLAMPED_SWIGLU)
    return clamped_swiglu(gate, up);
  else
    return rounded(activated<ACTIVATION>(gate)) * up;
}

/// What `function` gives for an object whose type has `activation` as its `value`.
template <class Function>
inline auto with_activation(Activation activation, Function function) {
  switch (activation) {
    case Activation::SILU:
      return function(std::integral_constant<Activation, Activation::SILU>());
    case Activation::GELU:
      return function(std::integral_constant<Activation, Activation::GELU>());
    case Activation::GELU_TANH:
      return function(std::integral_constant<Activation, Activation::GELU_TANH>());
    case Activation::RELU:
      return function(std::integral_constant<Activation, Activation::RELU>());
    case Activation::RELU_SQUARED:
      return function(std::integral_constant<Activation, Activation::RELU_SQUARED>());
    case Activation::CLAMPED_SWIGLU:
      return function(std::integral_constant<Activation, Activation::CLAMPED_SWIGLU>());
  }
  __builtin_unreachable();
}

/// Of sums of two products: rounded where linear layer, activation and product would each be an operation of their own.
/// Products are too large to be compiled for each activation; theirs is chosen again for each sixteen of their sums.
inline Floats gated(Activation activation, Floats gate, Floats up) {
  return with_activation(activation,
                         [=](auto chosen) { return gated<decltype(chosen)::value>(rounded(gate), rounded(up)); });
}

/// The same of one product without a gate.
inline Floats activated(Activation activation, Floats x) {
  return with_activation(activation, [=](auto chosen) {
    if constexpr (decltype(chosen)::value == Activation::CLAMPED_SWIGLU)
      return x;  // Is for gates, and no program has it here.
    else
      return activated<decltype(chosen)::value>(rounded(x));
  });
}

}  // namespace inflight
