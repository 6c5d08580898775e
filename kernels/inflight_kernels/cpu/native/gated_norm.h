// RMSNorm of groups of columns, with a gate behind it or before it.
#pragma once

#include <cmath>

#include "linear.h"

namespace inflight {

template <Gate GATE>
inline Floats gate_of(Floats x) {
  return GATE == Gate::SILU ? silu(x) : sigmoid(x);
}

/// One group. `weight`: what is stored in the place of the normalised x at i, before the gate if that is behind it.
template <Gate GATE, class Weight>
inline void norm_group(const GatedRmsNorm& op, const Element* x, const Element* gate, Element* y, Weight weight) {
  const auto input = [&](int64_t i) {
    return op.gate_first ? load(x + i) * gate_of<GATE>(load(gate + i)) : load(x + i);
  };
  Floats squares = splat(0.0f);
  for (int64_t i = 0; i < op.group_size; i += 16) {
    const Floats some = input(i);
    squares = fma(some, some, squares);
  }
  const Floats factor = splat(1.0f / std::sqrt(sum(squares) / op.group_size + op.eps));
  for (int64_t i = 0; i < op.group_size; i += 16) {
    const Floats normed = weight(i, input(i) * factor);
    store(y + i, op.gate_first ? normed : normed * gate_of<GATE>(load(gate + i)));
  }
}

template <Gate GATE>
inline void norm_groups(const GatedRmsNorm& op, const Run& step) {
  const int64_t num_groups = op.size / op.group_size;
  share(step.batch.num_tokens * num_groups, [&](int64_t item) {
    const int64_t row = item / num_groups, column = item % num_groups * op.group_size;
    const auto at = [&](const Value& value) { return step.at(value) + row * step.stride(value) + column; };
    const int64_t first = op.weight_size == op.group_size ? 0 : column;
    if (op.weight.floats)
      norm_group<GATE>(op, at(op.x), at(op.gate), at(op.out),
                       [&](int64_t i, Floats x) { return x * load(op.weight.floats + first + i); });
    else
      norm_group<GATE>(op, at(op.x), at(op.gate), at(op.out),
                       [&](int64_t i, Floats x) { return rounded(rounded(x) * load(op.weight.elements + first + i)); });
  });
}

inline void run(const GatedRmsNorm& op, const Run& step) {
  op.activation == Gate::SILU ? norm_groups<Gate::SILU>(op, step) : norm_groups<Gate::SIGMOID>(op, step);
}

}  // namespace inflight
