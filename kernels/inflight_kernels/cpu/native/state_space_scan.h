// The recurrence of a state space with one decay a head, token by token.
//
// A work item is 16 rows of one head's state of one sequence, which do not depend on other rows, where they lie. Sums
// over the columns of a row have one order. So a token has the same bits in a decode and in a chunk with any borders.
#pragma once

#include "sequences.h"

namespace inflight {

constexpr int64_t STATE_ROWS_AT_ONCE = 16, MAX_STATE_DIM = 256;

/// Up to MAX_STATE_DIM elements as floats.
struct WideRow {
  alignas(64) float values[MAX_STATE_DIM];

  void read(const Element* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) store(values + i, load(from + i));
  }
};

/// Sixteen rows of a head's state: what a token makes of them, and the sums of their products with c. `inputs` are
/// those of the rows, times the token's part of time. `from` and `to` may be the same.
inline Floats advance_rows(const float* inputs, float decay, const WideRow& b, const WideRow& c, int64_t size,
                           const float* from, int64_t from_stride, float* to) {
  Floats totals[STATE_ROWS_AT_ONCE];
  for (int64_t row = 0; row < STATE_ROWS_AT_ONCE; ++row) {
    Floats total = splat(0.0f);
    for (int64_t i = 0; i < size; i += 16) {
      const Floats kept = load(from + row * from_stride + i) * splat(decay);
      const Floats now = fma(splat(inputs[row]), load(b.values + i), kept);
      store(to + row * size + i, now);
      total = fma(now, load(c.values + i), total);
    }
    totals[row] = total;
  }
  return sums_of(totals);
}

inline void run(const StateSpaceScan& op, const Run& step) {
  const int64_t num_parts = op.head_dim / STATE_ROWS_AT_ONCE;
  share_sequences(step, op.num_heads * num_parts, [&](const SequenceTokens& sequence, int64_t part) {
    const int64_t head = part / num_parts, first = part * STATE_ROWS_AT_ONCE;
    const int64_t group = head / (op.num_heads / op.num_groups) * op.state_dim;
    const auto rows_of = [&](int64_t slot) {
      return op.state + (slot * op.num_heads * op.head_dim + first) * op.state_dim;
    };
    float* const own = rows_of(sequence.slot);
    const Floats rate = rate_of(op.a_log[head]);
    WideRow b, c;
    for (int64_t token = sequence.start; token < sequence.end; ++token) {
      const auto row_of = [&](const Value& value) { return step.at(value) + token * step.stride(value); };
      b.read(row_of(op.b) + group, op.state_dim);
      c.read(row_of(op.c) + group, op.state_dim);
      const Floats growth = softplus(load(row_of(op.dt) + head, 1) + splat(op.dt_bias[head]));
      // Where it is no number, min and max give their second operand, so that it stays none.
      const Floats time = splat(first_of(max(splat(op.least), min(splat(op.most), growth))));
      const Floats x = load(row_of(op.x) + first);
      alignas(64) float inputs[STATE_ROWS_AT_ONCE];
      store(inputs, x * time);
      const bool is_new = sequence.is_first && token == sequence.start;
      const Floats sums = advance_rows(inputs, first_of(decay_of(rate * time)), b, c, op.state_dim,
                                       is_new ? ZEROS : own, is_new ? 0 : op.state_dim, own);
      store(row_of(op.out) + first, fma(splat(op.d[head]), x, sums));
      if (const int64_t slot = sequence.kept(token); slot >= 0)
        std::copy_n(own, STATE_ROWS_AT_ONCE * op.state_dim, rows_of(slot));
    }
  });
}

}  // namespace inflight
