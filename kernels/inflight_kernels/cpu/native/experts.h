// A mixture of experts: each token's choice, and the feed-forward of the experts that have tokens.
//
// The choices of all tokens are sorted by expert, tokens of one expert in their order, and their rows are copied side
// by side, so that a weight is read once for all tokens that need it. A row's sums do not depend on the rows beside it.
#pragma once

#include <cmath>

#include "linear.h"

namespace inflight {

/// Memory of one run: a choice is a token's k-th expert, num_tokens * num_chosen of them.
struct Choices {
  /// (num_tokens, num_chosen): expert, its weight, and its row among the sorted ones.
  int32_t* experts;
  float* weights;
  int32_t* rows;
  /// (num_experts + 1): where the rows of each expert begin.
  int32_t* starts;
  /// (choices and 32 more): a token's values, what its expert's first half makes of them, and its second half.
  Element *inputs, *activated, *outputs;

  /// Takes them from `pieces`, in the same order each time.
  Choices(const Experts& op, int64_t num_tokens, Pieces& pieces) {
    const int64_t count = num_tokens * op.num_chosen;
    experts = pieces.take<int32_t>(count);
    weights = pieces.take<float>(count);
    rows = pieces.take<int32_t>(count);
    starts = pieces.take<int32_t>(op.num_experts + 1);
    inputs = pieces.take<Element>((count + PANEL) * op.size);
    activated = pieces.take<Element>((count + PANEL) * op.inner_size);
    outputs = pieces.take<Element>((count + PANEL) * op.size);
  }
};

/// Softmax over all experts, and the most probable ones: among equal logits the lower expert, and NaN counts as -inf.
inline void choose_experts(const Experts& op, const Element* logits, int32_t* experts, float* weights) {
  float* const shares = own_room<Experts, float>(round_up(op.num_experts, 16));
  const float lowest = -3.0e38f;
  for (int64_t i = 0; i < op.num_experts; i += 16)
    store(shares + i, max(load(logits + i, op.num_experts - i), splat(lowest)));
  for (int64_t k = 0; k < op.num_chosen; ++k) {
    float* const best = std::max_element(shares, shares + op.num_experts);
    experts[k] = static_cast<int32_t>(best - shares);
    weights[k] = *best;
    *best = -INFINITY;
  }
  for (int64_t k = 0; k < op.num_chosen; ++k) shares[experts[k]] = weights[k];
  const float peak = shares[experts[0]];
  Floats total = splat(0.0f);
  for (int64_t i = 0; i < op.num_experts; i += 16) {
    // Far enough below for a share of 0.
    const Floats x = exp2(max((load(shares + i) - splat(peak)) * splat(LOG2_E), splat(-1000.0f)));
    const Floats share = keep_lanes(x, 0, op.num_experts - i, splat(0.0f));
    store(shares + i, share);
    total = total + share;
  }
  float sum_of_shares = sum(total);
  for (int64_t k = 0; k < op.num_chosen; ++k) weights[k] = shares[experts[k]];
  if (op.renormalizes) {
    sum_of_shares = 0.0f;
    for (int64_t k = 0; k < op.num_chosen; ++k) sum_of_shares += weights[k];
  }
  for (int64_t k = 0; k < op.num_chosen; ++k) weights[k] /= sum_of_shares;
}

/// Gives each choice its row, of one thread.
inline void sort_choices(const Experts& op, int64_t num_choices, const Choices& choices) {
  std::fill_n(choices.starts, op.num_experts + 1, 0);
  for (int64_t i = 0; i < num_choices; ++i) ++choices.starts[choices.experts[i] + 1];
  for (int64_t expert = 0; expert < op.num_experts; ++expert) choices.starts[expert + 1] += choices.starts[expert];
  std::vector<int32_t> next(choices.starts, choices.starts + op.num_experts);
  for (int64_t i = 0; i < num_choices; ++i) choices.rows[i] = next[choices.experts[i]]++;
}

/// `finish(row, panel, sums)` for the product of each expert's rows of x and its matrix, `num_panels` panels of all.
template <class Finish>
inline void multiply_by_experts(const Experts& op, const Instructions& instructions, const int32_t* starts,
                                const Element* x, const Matrix& matrix, int64_t num_panels, Finish finish) {
  const int64_t group = std::min(panels_of_group(matrix), num_panels), num_groups = ceil_div(num_panels, group);
  const int64_t num_inputs = matrix.num_inputs;
  share(op.num_experts * num_groups, [&](int64_t item) {
    const int64_t expert = item / num_groups, first = item % num_groups * group, begin = expert * num_panels;
    const Instruction instruction = instruction_for(instructions, starts[expert + 1] - starts[expert]);
    const int64_t block = MatrixProduct::most_rows(instruction, matrix);
    for (int64_t start = starts[expert]; start < starts[expert + 1]; start += block)
      multiply_block(instruction, x + start * num_inputs, num_inputs, std::min(block, starts[expert + 1] - start),
                     matrix, begin + first, begin + std::min(first + group, num_panels),
                     [&](int64_t row, int64_t panel, const float* sums) { finish(start + row, panel - begin, sums); });
  });
}

inline void run(const Experts& op, const Run& step) {
  const int64_t num_tokens = step.batch.num_tokens, num_choices = num_tokens * op.num_chosen;
  Pieces pieces{step.choices};
  const Choices choices(op, num_tokens, pieces);
  share(num_tokens, [&](int64_t token) {
    const int64_t first = token * op.num_chosen;
    choose_experts(op, step.at(op.logits) + token * step.stride(op.logits), choices.experts + first,
                   choices.weights + first);
  });
  if (omp_get_thread_num() == 0) sort_choices(op, num_choices, choices);
  wait_for_all();
  share(num_choices, [&](int64_t choice) {
    std::copy_n(step.at(op.x) + choice / op.num_chosen * step.stride(op.x), op.size,
                choices.inputs + choices.rows[choice] * op.size);
  });
  multiply_by_experts(op, step.instructions(), choices.starts, choices.inputs, op.gate_up, op.inner_size / 16,
                      [&](int64_t row, int64_t panel, const float* sums) {
                        store(choices.activated + row * op.inner_size + 16 * panel, gated(load(sums), load(sums + 16)));
                      });
  multiply_by_experts(op, step.instructions(), choices.starts, choices.activated, op.down, op.size / PANEL,
                      [&](int64_t row, int64_t panel, const float* sums) {
                        Element* const out = choices.outputs + row * op.size + PANEL * panel;
                        store(out, load(sums));
                        store(out + 16, load(sums + 16));
                      });
  share(num_tokens, [&](int64_t token) {
    Element* const out = step.at(op.out) + token * step.stride(op.out);
    for (int64_t i = 0; i < op.size; i += 16) {
      Floats total = splat(0.0f);
      for (int64_t choice = token * op.num_chosen; choice < (token + 1) * op.num_chosen; ++choice)
        total = total + load(choices.outputs + choices.rows[choice] * op.size + i) * splat(choices.weights[choice]);
      store(out + i, total);
    }
  });
}

}  // namespace inflight
