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

/// Floats of one head's result of a part: head_dim weighted values, then the maximum and the sum of weights.
inline int64_t part_size(const Attention& op) { return op.cache.head_dim + 16; }

/// Floats that the operation needs for all results of its parts.
inline int64_t count_part_floats(const Attention& op, const Batch& batch) {
  return batch.num_decodes * op.num_heads * most_parts(op, batch) * part_size(op);
}

/// One part for up to 32 heads of a row's token; `parts` is the first head's result, `stride` floats apart.
inline void attend_part(const Attention& op, const Run& step, const Queries& heads, const int32_t* blocks,
                        int64_t kv_head, int64_t part, float* parts, int64_t stride) {
  const int64_t head_dim = op.cache.head_dim;
  alignas(64) Bf16 keys[KEYS_AT_ONCE * MAX_HEAD_DIM], values[KEYS_AT_ONCE * MAX_HEAD_DIM];
  Gathered gathered;
  Attending attending(op, step, heads);
  attending.gather_part(
      part,
      [&](int64_t first) {
        for (int64_t i = 0; i < KEYS_AT_ONCE && first + i < heads.end; i += PANEL)
          pack_keys_and_values(op, blocks, kv_head, first + i, heads.end, keys + i * head_dim,
                               values + panel_elements(i), panel_elements(KEYS_AT_ONCE));
        return Panels{keys, values, panel_elements(KEYS_AT_ONCE)};
      },
      gathered);
  for (int64_t head = 0; head < heads.count; ++head) {
    float* result = parts + head * stride;
    std::copy_n(gathered.sums + head * head_dim, head_dim, result);
    result[head_dim] = gathered.maxima[head];
    result[head_dim + 1] = gathered.totals[head];
  }
}

inline void run_decode(const Attention& op, const Run& step) {
  const Batch& batch = step.batch;
  const int64_t most = most_parts(op, batch), num_kv_heads = op.cache.num_kv_heads, num_rows = batch.num_decodes;
  const int64_t size = part_size(op), of_head = most * size, head_dim = op.cache.head_dim;
  const int64_t tiles = ceil_div(op.queries_per_key(), QUERIES_AT_ONCE);
  share(num_rows * num_kv_heads * tiles * most, [&](int64_t item) {
    const int64_t tile = item % tiles, kv_head = item / tiles % num_kv_heads;
    const int64_t row = item / tiles / num_kv_heads % num_rows, part = item / tiles / num_kv_heads / num_rows;
    const Context context(op, batch.decode_lens[row]);
    if (part >= context.num_parts) return;
    const int64_t first = tile * QUERIES_AT_ONCE, head = kv_head * op.queries_per_key() + first;
    const Queries heads{step.at(op.queries) + row * step.stride(op.queries) + head * head_dim, head_dim,
                        std::min(QUERIES_AT_ONCE, op.queries_per_key() - first), context.begin, context.end, 0};
    attend_part(op, step, heads, batch.decode_table + row * batch.decode_width, kv_head,
                (context.first_part + part) * KEYS_OF_PART,
                step.parts + (row * op.num_heads + head) * of_head + part * size, of_head);
  });
  share(num_rows * op.num_heads, [&](int64_t item) {
    const int64_t row = item / op.num_heads, head = item % op.num_heads;
    float* sums = step.parts + item * of_head;
    float &maximum = sums[head_dim], &total = sums[head_dim + 1];
    for (int64_t i = 1; i < Context(op, batch.decode_lens[row]).num_parts; ++i) {
      const float* part = sums + i * size;
      merge(part, part[head_dim], part[head_dim + 1], head_dim, sums, maximum, total);
    }
    finish(sums, total, head_dim, step.at(op.out) + row * step.stride(op.out) + head * head_dim);
  });
}

}  // namespace inflight
