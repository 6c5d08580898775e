// Attention of one new token a row over the paged cache.
//
// A work item is one part of a row's context for the query heads of one key head, so that a few rows keep all threads
// busy. It packs the keys and values that it passes over, and leaves its results to be merged, as in flash decoding.
#pragma once

#include "attention.h"

namespace inflight {

/// Parts of the keys that a row's token sees, the first of them, and the first key.
struct Context {
  int64_t begin, end, first_part, num_parts;

  Context(const Attention& op, int64_t length) : begin(first_key(op, length)), end(length) {
    first_part = begin / KEYS_OF_PART;
    num_parts = ceil_div(end, KEYS_OF_PART) - first_part;
  }
};

/// The parts of the row that has most.
inline int64_t most_parts(const Attention& op, const Batch& batch) {
  int64_t most = 1;
  for (int64_t row = 0; row < batch.num_decodes; ++row)
    most = std::max(most, Context(op, batch.decode_lens[row]).num_parts);
  return most;
}

/// Floats of one head's result of a part: its weighted values, then the maximum and the sum of weights.
inline int64_t part_size(const Attention& op) { return op.cache.value_dim + 16; }

/// Floats that the operation needs for all results of its parts.
inline int64_t count_part_floats(const Attention& op, const Batch& batch) {
  return batch.num_decodes * op.num_heads * most_parts(op, batch) * part_size(op);
}

/// What up to 32 heads of a row's token gather of one part.
inline void gather_part(const Attention& op, const Run& step, const Queries& heads, const int32_t* blocks,
                        int64_t kv_head, int64_t part, Gathered& gathered) {
  alignas(64) Element keys[KEYS_AT_ONCE * MAX_HEAD_DIM], values[KEYS_AT_ONCE * MAX_HEAD_DIM];
  const auto pack = [&](int64_t first) {
    for (int64_t i = 0; i < KEYS_AT_ONCE && first + i < heads.end; i += PANEL)
      pack_keys_and_values(op, blocks, kv_head, first + i, heads.end, keys + i * op.cache.head_dim,
                           values + panel_elements(i), panel_elements(KEYS_AT_ONCE));
    return Panels{keys, values, panel_elements(KEYS_AT_ONCE)};
  };
  Attending(op, step, heads).gather_part(part, pack, gathered);
}

/// A row's output if it has one part, else results that are merged when all are there.
inline void run_decode(const Attention& op, const Run& step) {
  const Batch& batch = step.batch;
  const int64_t most = most_parts(op, batch), num_kv_heads = op.cache.num_kv_heads, num_rows = batch.num_decodes;
  const int64_t size = part_size(op), of_head = most * size, head_dim = op.cache.head_dim;
  const int64_t value_dim = op.cache.value_dim;
  const int64_t tiles = ceil_div(queries_per_key(op), QUERIES_AT_ONCE);
  const auto out = [&](int64_t row, int64_t head) {
    return step.at(op.out) + row * step.stride(op.out) + head * value_dim;
  };
  share(num_rows * num_kv_heads * tiles * most, [&](int64_t item) {
    const int64_t tile = item % tiles, kv_head = item / tiles % num_kv_heads;
    const int64_t row = item / tiles / num_kv_heads % num_rows, part = item / tiles / num_kv_heads / num_rows;
    const Context context(op, batch.decode_lens[row]);
    if (part >= context.num_parts) return;
    const int64_t first = kv_head * queries_per_key(op) + tile * QUERIES_AT_ONCE;
    const int64_t count = std::min(QUERIES_AT_ONCE, queries_per_key(op) - tile * QUERIES_AT_ONCE);
    const Queries heads{step.at(op.queries) + row * step.stride(op.queries) + first * head_dim,
                        head_dim,
                        count,
                        context.begin,
                        context.end,
                        0};
    Gathered gathered;
    gather_part(op, step, heads, blocks_of(batch, op.cache, batch.decode_rows[row]), kv_head,
                (context.first_part + part) * KEYS_OF_PART, gathered);
    for (int64_t i = 0; i < count; ++i) {
      const float* sums = gathered.sums + i * value_dim;
      if (context.num_parts == 1) {
        finish(op, first + i, sums, gathered.maxima[i], gathered.totals[i], out(row, first + i));
        continue;
      }
      float* result = step.parts + (row * op.num_heads + first + i) * of_head + part * size;
      std::copy_n(sums, value_dim, result);
      result[value_dim] = gathered.maxima[i];
      result[value_dim + 1] = gathered.totals[i];
    }
  });
  if (most == 1) return;
  share(num_rows * op.num_heads, [&](int64_t item) {
    const int64_t row = item / op.num_heads, head = item % op.num_heads;
    const int64_t num_parts = Context(op, batch.decode_lens[row]).num_parts;
    if (num_parts == 1) return;
    float* sums = step.parts + item * of_head;
    float &maximum = sums[value_dim], &total = sums[value_dim + 1];
    for (int64_t i = 1; i < num_parts; ++i) {
      const float* part = sums + i * size;
      merge(part, part[value_dim], part[value_dim + 1], value_dim, sums, maximum, total);
    }
    finish(op, head, sums, maximum, total, out(row, head));
  });
}

}  // namespace inflight
