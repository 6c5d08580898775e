// A mixture of experts: each token's choice, and the feed-forward of the experts that have tokens, gated or not.
//
// The choices of all tokens are sorted by expert, tokens of one expert in their order, and their rows are copied side
// by side, so that a weight is read once for all tokens that need it. A row's sums do not depend on the rows beside it.
#pragma once

#include <cmath>

#include "linear.h"

namespace inflight {

/// Memory of one run: a choice is a token's k-th expert, num_tokens * num_chosen of them.
struct Choices {
  /// (num_tokens, num_chosen): expert, counted from this rank's first one on, its weight, and its row among the sorted.
  int32_t* experts;
  float* weights;
  int32_t* rows;
  /// (num_own + 1): where the rows of each expert begin.
  int32_t* starts;
  /// (choices and 32 more): a token's values, what its expert's first half makes of them, and its second half.
  Element *inputs, *activated, *outputs;

  /// Takes them from `pieces`, in the same order each time.
  Choices(const Experts& op, int64_t num_tokens, Pieces& pieces) {
    const int64_t count = num_tokens * op.num_chosen;
    experts = pieces.take<int32_t>(count);
    weights = pieces.take<float>(count);
    rows = pieces.take<int32_t>(count);
    starts = pieces.take<int32_t>(op.num_own + 1);
    inputs = pieces.take<Element>((count + PANEL) * op.size);
    activated = pieces.take<Element>((count + PANEL) * op.inner_size);
    outputs = pieces.take<Element>((count + PANEL) * op.size);
  }
};

/// Of a logit that is none, and below all that can be chosen: of one that is chosen already.
constexpr float LOWEST = -3.0e38f, TAKEN = -INFINITY;

/// The highest of `compared`, the first one among equals, which is then TAKEN.
inline int64_t take_highest(float* compared, int64_t count) {
  float* const best = std::max_element(compared, compared + count);
  *best = TAKEN;
  return best - compared;
}

/// The softmax of all logits before it is divided by their sum, which is returned, or their sigmoids.
inline float score(const Experts& op, const float* logits, float* scores) {
  if (op.scores == Scores::SIGMOID) {
    for (int64_t i = 0; i < op.num_experts; i += 16) store(scores + i, sigmoid(load(logits + i)));
    return 1.0f;
  }
  const Floats peak = splat(*std::max_element(logits, logits + op.num_experts));
  Floats total = splat(0.0f);
  for (int64_t i = 0; i < op.num_experts; i += 16) {
    // Far enough below for a share of 0.
    const Floats x = exp2(max((load(logits + i) - peak) * splat(LOG2_E), splat(-1000.0f)));
    const Floats share = keep_lanes(x, 0, op.num_experts - i, splat(0.0f));
    store(scores + i, share);
    total = total + share;
  }
  return sum(total);
}

inline bool adds_scores(const Experts& op) {
  return op.num_chosen_groups < op.num_groups && op.group_score == GroupScore::TOP2_SUM;
}

/// Takes all experts but those of the best groups; `best` has room for a number of each group.
inline void take_other_groups(const Experts& op, float* compared, float* best) {
  const int64_t size = op.num_experts / op.num_groups;
  for (int64_t group = 0; group < op.num_groups; ++group) {
    float first = TAKEN, second = TAKEN;
    for (int64_t i = group * size; i < (group + 1) * size; ++i) {
      second = std::max(second, std::min(first, compared[i]));
      first = std::max(first, compared[i]);
    }
    best[group] = adds_scores(op) ? std::max(first + second, LOWEST) : first;
  }
  for (int64_t i = 0; i < op.num_chosen_groups; ++i) take_highest(best, op.num_groups);
  for (int64_t group = 0; group < op.num_groups; ++group)
    if (best[group] != TAKEN) std::fill_n(compared + group * size, size, TAKEN);
}

/// The chosen experts of a token, in descending order of what is compared, and their weights.
inline void choose_experts(const Experts& op, const Element* row, int32_t* experts, float* weights) {
  const int64_t room = round_up(op.num_experts, 16);
  float* const logits = own_room<Experts, float>(4 * room);
  float *const scores = logits + room, *const compared = scores + room, *const best = compared + room;
  for (int64_t i = 0; i < op.num_experts; i += 16)
    store(logits + i, max(load(row + i, op.num_experts - i), splat(LOWEST)));
  float total = score(op, logits, scores);
  if (op.choice_bias || adds_scores(op)) {
    for (int64_t i = 0; i < op.num_experts; i += 16) {
      const Floats share = load(scores + i) / splat(total);
      const Floats bias = op.choice_bias ? load(op.choice_bias + i, op.num_experts - i) : splat(0.0f);
      store(compared + i, max(share + bias, splat(LOWEST)));
    }
  } else {
    std::copy_n(logits, op.num_experts, compared);
  }
  if (op.num_chosen_groups < op.num_groups) take_other_groups(op, compared, best);
  for (int64_t k = 0; k < op.num_chosen; ++k) {
    experts[k] = static_cast<int32_t>(take_highest(compared, op.num_experts));
    weights[k] = scores[experts[k]];
  }
  if (op.renormalizes) {
    total = op.scores == Scores::SIGMOID ? op.epsilon : 0.0f;
    for (int64_t k = 0; k < op.num_chosen; ++k) total += weights[k];
  }
  for (int64_t k = 0; k < op.num_chosen; ++k) {
    weights[k] = weights[k] / total * op.scale;
    if (op.factors) weights[k] *= op.factors[experts[k]];
    experts[k] -= static_cast<int32_t>(op.first_expert);
  }
}

/// The same as the batch says it.
inline void take_given(const Experts& op, const Batch& batch, int64_t token, int32_t* experts, float* weights) {
  std::copy_n(batch.experts + token * op.num_chosen, op.num_chosen, experts);
  std::copy_n(batch.expert_weights + token * op.num_chosen, op.num_chosen, weights);
}

inline bool is_expert(const Experts& op, int32_t chosen) { return chosen >= 0 && chosen < op.num_own; }

/// Gives each choice of an expert its row, of one thread.
inline void sort_choices(const Experts& op, int64_t num_choices, const Choices& choices) {
  std::fill_n(choices.starts, op.num_own + 1, 0);
  for (int64_t i = 0; i < num_choices; ++i)
    if (is_expert(op, choices.experts[i])) ++choices.starts[choices.experts[i] + 1];
  for (int64_t expert = 0; expert < op.num_own; ++expert) choices.starts[expert + 1] += choices.starts[expert];
  std::vector<int32_t> next(choices.starts, choices.starts + op.num_own);
  for (int64_t i = 0; i < num_choices; ++i)
    if (is_expert(op, choices.experts[i])) choices.rows[i] = next[choices.experts[i]]++;
}

/// Columns of a row in the order of an expert's inputs, `count` of all that `columns` has for it.
inline void gather(const Element* row, const int32_t* columns, int64_t expert, int64_t count, Element* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = row[columns[expert * count + i]];
}

/// What is activated in the order of the inputs of its expert's second half.
inline void order_activated(const Experts& op, int64_t num_choices, const Choices& choices) {
  share(num_choices, [&](int64_t choice) {
    const int32_t expert = choices.experts[choice];
    if (!is_expert(op, expert)) return;
    Element* const row = choices.activated + choices.rows[choice] * op.inner_size;
    Element* const room = own_room<Experts, Element>(op.num_inner);
    std::copy_n(row, op.num_inner, room);
    gather(room, op.inner_columns, expert, op.num_inner, row);
  });
}

/// `finish(expert, row, panel, sums)` for the product of each expert's rows of x and its matrix, `num_panels` panels of
/// all.
template <class Finish>
inline void multiply_by_experts(const Experts& op, const Instructions& instructions, const int32_t* starts,
                                const Element* x, const Matrix& matrix, int64_t num_panels, char* room, Finish finish) {
  const int64_t group = std::min(panels_of_group(matrix), num_panels), num_groups = ceil_div(num_panels, group);
  const Operand operand(x, matrix.num_inputs, starts[op.num_own], matrix, room);
  share(op.num_own * num_groups, [&](int64_t item) {
    const int64_t expert = item / num_groups, first = item % num_groups * group, begin = expert * num_panels;
    const Instruction instruction = instruction_for(instructions, starts[expert + 1] - starts[expert]);
    const int64_t block = most_rows(instruction, matrix);
    for (int64_t start = starts[expert]; start < starts[expert + 1]; start += block)
      operand.multiply_block(
          instruction, start, std::min(block, starts[expert + 1] - start), matrix, begin + first,
          begin + std::min(first + group, num_panels),
          [&](int64_t row, int64_t panel, const float* sums) { finish(expert, start + row, panel - begin, sums); });
  });
}

inline void run(const Experts& op, const Run& step) {
  const int64_t num_tokens = step.batch.num_tokens, num_choices = num_tokens * op.num_chosen;
  Pieces pieces{step.choices};
  const Choices choices(op, num_tokens, pieces);
  share(num_tokens, [&](int64_t token) {
    int32_t* const experts = choices.experts + token * op.num_chosen;
    float* const weights = choices.weights + token * op.num_chosen;
    if (op.logits.buffer < 0)
      take_given(op, step.batch, token, experts, weights);
    else
      choose_experts(op, step.at(op.logits) + token * step.stride(op.logits), experts, weights);
  });
  if (omp_get_thread_num() == 0) sort_choices(op, num_choices, choices);
  wait_for_all();
  share(num_choices, [&](int64_t choice) {
    if (!is_expert(op, choices.experts[choice])) return;
    const Element* const x = step.at(op.x) + choice / op.num_chosen * step.stride(op.x);
    Element* const input = choices.inputs + choices.rows[choice] * op.size;
    if (op.columns)
      gather(x, op.columns, choices.experts[choice], op.size, input);
    else
      std::copy_n(x, op.size, input);
  });
  multiply_by_experts(op, step.instructions(), choices.starts, choices.inputs, op.gate_up,
                      op.inner_size / (op.is_gated ? 16 : PANEL), step.integers,
                      [&](int64_t expert, int64_t row, int64_t panel, const float* sums) {
                        if (!op.is_gated) {
                          Element* const out = choices.activated + row * op.inner_size + PANEL * panel;
                          for (int64_t i = 0; i < PANEL; i += 16)
                            store(out + i, activated(op.activation, load(sums + i)));
                          return;
                        }
                        Floats gate = load(sums), up = load(sums + 16);
                        if (op.gate_up_bias) {
                          const Element* const bias = op.gate_up_bias + 2 * op.inner_size * expert + 16 * panel;
                          gate = gate + load(bias);
                          up = up + load(bias + op.inner_size);
                        }
                        store(choices.activated + row * op.inner_size + 16 * panel, gated(op.activation, gate, up));
                      });
  if (op.inner_columns) order_activated(op, num_choices, choices);
  multiply_by_experts(op, step.instructions(), choices.starts, choices.activated, op.down, op.size / PANEL,
                      step.integers, [&](int64_t expert, int64_t row, int64_t panel, const float* sums) {
                        Element* const out = choices.outputs + row * op.size + PANEL * panel;
                        for (int64_t i = 0; i < PANEL; i += 16) {
                          const Floats y = load(sums + i);
                          const int64_t column = expert * op.size + PANEL * panel + i;
                          store(out + i, op.down_bias ? y + load(op.down_bias + column) : y);
                        }
                      });
  share(num_tokens, [&](int64_t token) {
    Element* const out = step.at(op.out) + token * step.stride(op.out);
    for (int64_t i = 0; i < op.size; i += 16) {
      Floats total = splat(0.0f);
      for (int64_t choice = token * op.num_chosen; choice < (token + 1) * op.num_chosen; ++choice)
        if (is_expert(op, choices.experts[choice]))
          total = total + load(choices.outputs + choices.rows[choice] * op.size + i) * splat(choices.weights[choice]);
      store(out + i, total);
    }
  });
}

}  // namespace inflight
