// Attention of tokens to all of their own sequence, before and behind them, as prompt chunks have it over the cache:
// the keys and values of as many sequences as the workspace has room for are packed as panels, then each work item is
// 32 queries of one head.
#pragma once

#include "attention.h"

namespace inflight {

/// Where one sequence's tokens are, and its keys and values in the workspace: of each head `padded()` keys, and then as
/// many values.
struct PackedSequence {
  int64_t first_token, num_tokens, keys, values;

  int64_t padded() const { return round_up(num_tokens, PANEL); }
};

/// Sequence `number`, placed in a workspace of which `used` elements are taken; adds its own to them.
inline PackedSequence find_sequence(const BidirectionalAttention& op, const Batch& batch, int64_t number,
                                    int64_t& used) {
  const int32_t* const starts = batch.sequences.starts;
  PackedSequence sequence{starts[number], starts[number + 1] - starts[number], used, 0};
  const int64_t count = sequence.padded() * op.num_kv_heads * op.head_dim;
  sequence.values = used + count;
  used += 2 * count;
  return sequence;
}

/// Elements of the workspace that the operation needs, as for prefills.
inline int64_t count_packed(const BidirectionalAttention& op, const Batch& batch, const Program& program) {
  int64_t total = 0, largest = 0;
  for (int64_t number = 0; number < batch.sequences.count; ++number) {
    const int64_t before = total;
    find_sequence(op, batch, number, total);
    largest = std::max(largest, total - before);
  }
  return std::max(std::min(total, program.packed_at_once), largest);
}

/// What attention over the cache calls the same.
inline Attention over_cache(const BidirectionalAttention& op) {
  Attention same{};
  same.cache.num_kv_heads = op.num_kv_heads;
  same.cache.head_dim = same.cache.value_dim = op.head_dim;
  same.cache.key_scale = same.cache.value_scale = 1.0f;
  same.num_heads = op.num_heads;
  same.scale = op.scale;
  return same;
}

/// Lay out the keys and values of one head of 32 tokens from `start` on as panels; zeros behind the last token.
inline void pack_tokens(const BidirectionalAttention& op, const Run& step, const PackedSequence& sequence,
                        int64_t kv_head, int64_t start) {
  const Element *keys[PANEL], *values[PANEL];
  const int64_t count = std::min(sequence.num_tokens - start, PANEL), before = kv_head * sequence.padded();
  for (int64_t i = 0; i < PANEL; ++i) {
    const int64_t token = sequence.first_token + start + i, column = kv_head * op.head_dim;
    keys[i] = i < count ? step.at(op.keys) + token * step.stride(op.keys) + column : nullptr;
    values[i] = i < count ? step.at(op.values) + token * step.stride(op.values) + column : nullptr;
  }
  Element* const key_panel = step.packed + sequence.keys + (before + start) * op.head_dim;
  Element* const value_panel = step.packed + sequence.values + before * op.head_dim + panel_elements(start);
  for (int64_t i = 0; i < op.head_dim; i += PANEL) {
    pack_rows(keys, key_panel + panel_elements(i));
    pack_columns(values, value_panel + panel_elements(sequence.padded()) * i / PANEL);
    for (int64_t n = 0; n < count; ++n) {
      keys[n] += PANEL;
      values[n] += PANEL;
    }
  }
}

/// Attention of 32 queries of one head, from `start` of the sequence on.
inline void attend_both_ways(const BidirectionalAttention& op, const Attention& same, const Run& step,
                             const PackedSequence& sequence, int64_t head, int64_t start) {
  const int64_t padded = sequence.padded(), kv_head = head / queries_per_key(same);
  const Element* const keys = step.packed + sequence.keys + kv_head * padded * op.head_dim;
  const Element* const values = step.packed + sequence.values + kv_head * padded * op.head_dim;
  const auto find = [&](int64_t key) {
    return Panels{keys + key * op.head_dim, values + panel_elements(key), panel_elements(padded)};
  };
  const int64_t row = sequence.first_token + start, stride = step.stride(op.queries);
  Queries queries{step.at(op.queries) + row * stride + head * op.head_dim,
                  stride,
                  std::min(QUERIES_AT_ONCE, sequence.num_tokens - start),
                  0,
                  sequence.num_tokens,
                  0,
                  sequence.num_tokens};
  if (op.window) {
    queries.begin = start - op.window;
    queries.end = start + op.window + 1;
    queries.advance = 1;
  }
  if (op.bias) queries.bias = op.bias + head * op.bias_size + op.bias_size / 2 - start;

  Attending attending(same, step, queries);
  Gathered gathered, added;
  const int64_t first_part = std::max<int64_t>(queries.begin, 0) / KEYS_OF_PART * KEYS_OF_PART;
  attending.gather_part(first_part, find, gathered);
  for (int64_t part = first_part + KEYS_OF_PART; part < queries.end_of_last(); part += KEYS_OF_PART) {
    attending.gather_part(part, find, added);
    gathered.add(added, queries.count, op.head_dim);
  }
  for (int64_t query = 0; query < queries.count; ++query)
    finish(same, head, gathered.sums + query * op.head_dim, gathered.maxima[query], gathered.totals[query],
           step.at(op.out) + (row + query) * step.stride(op.out) + head * op.head_dim);
}

/// Sequences `first` to `end`, for whose keys and values the workspace has room.
inline void attend_sequences(const BidirectionalAttention& op, const Run& step, int64_t first, int64_t end) {
  const Attention same = over_cache(op);
  int64_t used = 0;
  for (int64_t number = first; number < end; ++number) {
    const PackedSequence sequence = find_sequence(op, step.batch, number, used);
    share_and_go_on(sequence.padded() / PANEL * op.num_kv_heads, [&](int64_t item) {
      pack_tokens(op, step, sequence, item % op.num_kv_heads, item / op.num_kv_heads * PANEL);
    });
  }
  wait_for_all();
  used = 0;
  for (int64_t number = first; number < end; ++number) {
    const PackedSequence sequence = find_sequence(op, step.batch, number, used);
    share_and_go_on(ceil_div(sequence.num_tokens, QUERIES_AT_ONCE) * op.num_heads, [&](int64_t item) {
      attend_both_ways(op, same, step, sequence, item % op.num_heads, item / op.num_heads * QUERIES_AT_ONCE);
    });
  }
  wait_for_all();
}

inline void run(const BidirectionalAttention& op, const Run& step) {
  const int64_t room = count_packed(op, step.batch, step.program);
  for (int64_t first = 0, end; first < step.batch.sequences.count; first = end) {
    int64_t used = 0;
    for (end = first; end < step.batch.sequences.count; ++end) {
      find_sequence(op, step.batch, end, used);
      if (used > room) break;
    }
    attend_sequences(op, step, first, end);
  }
}

}  // namespace inflight
