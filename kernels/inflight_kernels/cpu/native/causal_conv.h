// A short convolution of each channel over its sequence's tokens.
//
// A work item is some channels of one sequence. It adds up an element's products from the oldest input to the newest,
// behind the bias, so an element has the same bits in a decode and in a chunk with any borders.
#pragma once

#include <cstring>

#include "sequences.h"

namespace inflight {

constexpr int64_t CHANNELS_AT_ONCE = 128, MAX_TAPS = 8;

/// The inputs of some channels of one sequence: those of the step, and before them those of its state.
class ConvInputs {
 public:
  ConvInputs(const CausalConv& op, const Run& step, const SequenceTokens& sequence, int64_t channel)
      : op_(op),
        step_rows_(step.at(op.x) + sequence.start * step.stride(op.x) + channel),
        stride_(step.stride(op.x)),
        channel_(channel),
        is_first_(sequence.is_first),
        state_(at(sequence.slot, 0)) {}

  /// That of a token, counted from the sequence's first one of the step; it may be before it by `num_taps` - 1.
  const Element* row(int64_t token) const {
    static constexpr Element ZEROS[CHANNELS_AT_ONCE] = {};
    if (token >= 0) return step_rows_ + token * stride_;
    return is_first_ ? ZEROS : state_ + (token + op_.num_taps - 1) * op_.size;
  }

  /// Write the state behind a token to a slot. It may be that which the state is read from: rows move towards the first
  /// one.
  void keep(int64_t token, int64_t slot) const {
    const int64_t count = std::min(CHANNELS_AT_ONCE, op_.size - channel_);
    for (int64_t i = 0; i < op_.num_taps - 1; ++i)
      std::memcpy(at(slot, i), row(token + 2 - op_.num_taps + i), count * sizeof(Element));
  }

 private:
  Element* at(int64_t slot, int64_t row) const {
    return op_.state + (slot * (op_.num_taps - 1) + row) * op_.size + channel_;
  }

  const CausalConv& op_;
  const Element* step_rows_;
  int64_t stride_, channel_;
  bool is_first_;
  const Element* state_;
};

/// `finish(y)` gives what is stored in the place of a sum.
template <class Finish>
inline void convolve(const CausalConv& op, const Run& step, Finish finish) {
  share_sequences(step, ceil_div(op.size, CHANNELS_AT_ONCE), [&](const SequenceTokens& sequence, int64_t part) {
    const int64_t channel = part * CHANNELS_AT_ONCE, end = std::min(op.size - channel, CHANNELS_AT_ONCE);
    const ConvInputs inputs(op, step, sequence, channel);
    for (int64_t token = 0; token < sequence.count(); ++token) {
      const Element* rows[MAX_TAPS];
      for (int64_t tap = 0; tap < op.num_taps; ++tap) rows[tap] = inputs.row(token + tap + 1 - op.num_taps);
      Element* const out = step.at(op.out) + (sequence.start + token) * step.stride(op.out) + channel;
      for (int64_t i = 0; i < end; i += 16) {
        Floats total = op.bias ? load(op.bias + channel + i, end - i) : splat(0.0f);
        for (int64_t tap = 0; tap < op.num_taps; ++tap)
          total = fma(load(rows[tap] + i, end - i), load(op.weight + tap * op.size + channel + i, end - i), total);
        store(out + i, finish(total), end - i);
      }
      if (const int64_t slot = sequence.kept(sequence.start + token); slot >= 0) inputs.keep(token, slot);
    }
    inputs.keep(sequence.count() - 1, sequence.slot);
  });
}

inline void run(const CausalConv& op, const Run& step) {
  if (!op.activates) return convolve(op, step, [](Floats y) { return y; });
  with_activation(op.activation, [&](auto activation) {
    constexpr Activation ACTIVATION = decltype(activation)::value;
    if constexpr (ACTIVATION != Activation::CLAMPED_SWIGLU)
      convolve(op, step, [](Floats y) { return activated<ACTIVATION>(y); });
  });
}

}  // namespace inflight
