// Whose tokens a step has, for operations that keep a state for each sequence.
#pragma once

#include "linear.h"

namespace inflight {

/// The tokens of one sequence.
struct SequenceTokens {
  const Sequences& all;
  int64_t slot, start, end;
  /// Whether its state begins with zeros, whatever its slot holds.
  bool is_first;

  SequenceTokens(const Sequences& sequences, int64_t number)
      : all(sequences),
        slot(sequences.slots[number]),
        start(sequences.starts[number]),
        end(sequences.starts[number + 1]),
        is_first(sequences.positions[start] == 0) {}

  int64_t count() const { return end - start; }
  /// Another slot that takes the state behind a token of the step; negative = none.
  int64_t kept(int64_t token) const { return all.kept ? all.kept[token] : -1; }
};

/// exp(x) of x up to 0, which is what is left of a state.
inline Floats decay_of(Floats x) {
  // Where x is no number, max gives its second operand, so that it stays none.
  return exp2(max(splat(-1000.0f), x * splat(LOG2_E)));
}

/// The logarithm of what decays in a unit of time: -exp(a_log).
inline Floats rate_of(float a_log) { return splat(0.0f) - exp2(min(splat(127.0f), splat(a_log * LOG2_E))); }

/// What states that begin with zeros are read from.
constexpr int64_t ZEROS_AT_ONCE = 256;
alignas(64) inline constexpr float ZEROS[ZEROS_AT_ONCE] = {};

/// Calls `item(sequence, part)` for each of the step's sequences and of as many parts.
template <class Item>
inline void share_sequences(const Run& step, int64_t num_parts, Item item) {
  const Sequences& sequences = step.batch.sequences;
  share(sequences.count * num_parts, [&](int64_t i) { item(SequenceTokens(sequences, i / num_parts), i % num_parts); });
}

}  // namespace inflight
