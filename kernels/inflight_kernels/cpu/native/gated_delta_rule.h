// The gated delta rule of linear attention, token by token.
//
// A work item is 32 columns of one value head's state of one sequence: they do not depend on other columns. While it
// goes over the sequence's tokens they are in a room of their own, which stays in the first cache; the first token
// reads them from the sequence's slot, and the last one writes them there. Sums over the rows of a column are those of
// even rows and of odd rows, in their order, and both. So a token has the same bits in a decode and in a chunk with any
// borders.
#pragma once

#include <cmath>

#include "sequences.h"

namespace inflight {

constexpr int64_t COLUMNS_AT_ONCE = 32, MAX_KEY_DIM = 256;

/// What one token is to all columns of a head.
struct DeltaToken {
  alignas(64) float query[MAX_KEY_DIM], key[MAX_KEY_DIM], decay[MAX_KEY_DIM];
  /// key * decay.
  alignas(64) float faded[MAX_KEY_DIM];
  float beta;

  void read(const GatedDeltaRule& op, const Run& step, int64_t token, int64_t head) {
    const auto row_of = [&](const Value& value) { return step.at(value) + token * step.stride(value); };
    const int64_t key_head = head / (op.num_heads / op.num_key_heads);
    const Element* const queries = row_of(op.qkv) + key_head * op.key_dim;
    read_head(queries, op.key_dim, 1.0f / std::sqrt(static_cast<float>(op.key_dim)), query);
    read_head(queries + op.num_key_heads * op.key_dim, op.key_dim, 1.0f, key);
    beta = first_of(sigmoid(load(row_of(op.b) + head, 1)));
    const Floats rate = rate_of(op.a_log[head]);
    const Element* const a = row_of(op.a) + head * op.num_decays;
    const float* const bias = op.dt_bias + head * op.num_decays;
    Floats decays = splat(first_of(decay_of(rate * softplus(load(a, 1) + load(bias, 1)))));
    for (int64_t i = 0; i < op.key_dim; i += 16) {
      if (op.num_decays > 1) decays = decay_of(rate * softplus(load(a + i) + load(bias + i)));
      store(decay + i, decays);
      store(faded + i, load(key + i) * decays);
    }
  }

 private:
  /// x * factor / sqrt(sum(x ** 2) + 1e-6).
  static void read_head(const Element* x, int64_t size, float factor, float* y) {
    Floats squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
    const Floats scale = splat(factor / std::sqrt(sum(squares) + 1e-6f));
    for (int64_t i = 0; i < size; i += 16) store(y + i, load(x + i) * scale);
  }
};

/// Rows of a part of a state.
template <class Number>
struct StateRows {
  Number* first;
  int64_t stride;

  Number* row(int64_t number) const { return first + number * stride; }
};

/// Sixteen times `VECTORS` columns: what a token makes of them, and its output. `from` and `to` may be the same.
template <int VECTORS>
inline void apply_delta(const DeltaToken& token, int64_t key_dim, const Element* value, StateRows<const float> from,
                        StateRows<float> to, Element* out) {
  Floats sums[2][VECTORS], delta[VECTORS];
  for (auto& half : sums)
    for (Floats& sum : half) sum = splat(0.0f);
  for (int64_t k = 0; k < key_dim; k += 2)
    for (int odd = 0; odd < 2; ++odd)
      for (int n = 0; n < VECTORS; ++n)
        sums[odd][n] = fma(load(from.row(k + odd) + 16 * n), splat(token.faded[k + odd]), sums[odd][n]);
  for (int n = 0; n < VECTORS; ++n) {
    delta[n] = (load(value + 16 * n) - (sums[0][n] + sums[1][n])) * splat(token.beta);
    sums[0][n] = sums[1][n] = splat(0.0f);
  }
  for (int64_t k = 0; k < key_dim; k += 2)
    for (int odd = 0; odd < 2; ++odd) {
      const Floats decay = splat(token.decay[k + odd]), key = splat(token.key[k + odd]);
      for (int n = 0; n < VECTORS; ++n) {
        const Floats now = fma(key, delta[n], load(from.row(k + odd) + 16 * n) * decay);
        store(to.row(k + odd) + 16 * n, now);
        sums[odd][n] = fma(now, splat(token.query[k + odd]), sums[odd][n]);
      }
    }
  for (int n = 0; n < VECTORS; ++n) store(out + 16 * n, sums[0][n] + sums[1][n]);
}

/// All tokens of a sequence, for sixteen times `VECTORS` columns of a head from `column` on.
template <int VECTORS>
inline void run_columns(const GatedDeltaRule& op, const Run& step, const SequenceTokens& sequence, int64_t head,
                        int64_t column) {
  const auto rows_of = [&](int64_t slot) {
    return StateRows<float>{op.state + (slot * op.num_heads + head) * op.key_dim * op.value_dim + column, op.value_dim};
  };
  const StateRows<float> own = rows_of(sequence.slot);
  const int64_t place = head * op.value_dim + column;
  const int64_t first_value = 2 * op.num_key_heads * op.key_dim + place;
  alignas(64) float room[MAX_KEY_DIM * 16 * VECTORS];
  const StateRows<float> here{room, 16 * VECTORS};
  StateRows<const float> from{own.first, own.stride};
  if (sequence.is_first) from = {ZEROS, 0};
  DeltaToken values;
  for (int64_t token = sequence.start; token < sequence.end; ++token) {
    values.read(op, step, token, head);
    const StateRows<float> to = token + 1 < sequence.end ? here : own;
    apply_delta<VECTORS>(values, op.key_dim, step.at(op.qkv) + token * step.stride(op.qkv) + first_value, from, to,
                         step.at(op.out) + token * step.stride(op.out) + place);
    from = {to.first, to.stride};
    if (const int64_t slot = sequence.kept(token); slot >= 0)
      for (int64_t k = 0; k < op.key_dim; ++k) std::copy_n(from.row(k), 16 * VECTORS, rows_of(slot).row(k));
  }
}

inline void run(const GatedDeltaRule& op, const Run& step) {
  const int64_t num_parts = ceil_div(op.value_dim, COLUMNS_AT_ONCE);
  share_sequences(step, op.num_heads * num_parts, [&](const SequenceTokens& sequence, int64_t part) {
    const int64_t head = part / num_parts, column = part % num_parts * COLUMNS_AT_ONCE;
    if (op.value_dim - column < COLUMNS_AT_ONCE)
      run_columns<1>(op, step, sequence, head, column);
    else
      run_columns<2>(op, step, sequence, head, column);
  });
}

}  // namespace inflight
