// RMSNorm of columns of which this rank has a part: the squares of its own, and the norm by those of all ranks.
#pragma once

#include <cmath>
#include <cstring>

#include "linear.h"

namespace inflight {

inline void run(const RowSquares& op, const Run& step) {
  const bool has_gate = op.gate.buffer >= 0;
  share(step.batch.num_tokens, [&](int64_t row) {
    const auto row_of = [&](const Value& value) { return step.at(value) + row * step.stride(value); };
    const Element *const x = row_of(op.x), *const gate = has_gate ? row_of(op.gate) : nullptr;
    Floats squares = splat(0.0f);
    for (int64_t i = 0; i < op.size; i += 16) {
      const Floats some = has_gate ? load(x + i) * silu(load(gate + i)) : load(x + i);
      squares = fma(some, some, squares);
    }
    const float total = sum(squares);
    std::memcpy(row_of(op.out), &total, sizeof total);
  });
}

/// `weight(i, x)`: what is stored in the place of the normalised x at i, before the gate if that is behind it.
template <class Weight>
inline void norm_part(const RmsNormOfPart& op, const Run& step, Weight weight) {
  const bool has_gate = op.gate.buffer >= 0;
  share(step.batch.num_tokens, [&](int64_t row) {
    const auto row_of = [&](const Value& value) { return step.at(value) + row * step.stride(value); };
    const Element *const x = row_of(op.x), *const gate = has_gate ? row_of(op.gate) : nullptr;
    Element* const out = row_of(op.out);
    float squares = 0.0f;
    for (int64_t part = 0; part < op.num_parts; ++part) {
      const int64_t place = op.first_part + part * op.part_step;
      float own;
      std::memcpy(&own, reinterpret_cast<const char*>(row_of(op.squares)) + place * sizeof own, sizeof own);
      squares += own;
    }
    const Floats factor = splat(1.0f / std::sqrt(squares / op.num_columns + op.eps));
    for (int64_t i = 0; i < op.size; i += 16) {
      const Floats open = has_gate ? silu(load(gate + i)) : splat(1.0f);
      if (op.gate_first)
        store(out + i, weight(i, load(x + i) * open * factor));
      else
        store(out + i, weight(i, load(x + i) * factor) * open);
    }
  });
}

inline void run(const RmsNormOfPart& op, const Run& step) {
  if (op.weight.floats)
    norm_part(op, step, [&](int64_t i, Floats x) { return x * load(op.weight.floats + i); });
  else
    norm_part(op, step, [&](int64_t i, Floats x) { return rounded(rounded(x) * load(op.weight.elements + i)); });
}

}  // namespace inflight
