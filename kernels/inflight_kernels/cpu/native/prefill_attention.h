// Causal attention of prompt chunks over the paged cache: flash attention in products with panels.
//
// First the keys and values of as many chunks as the workspace has room for are packed as panels, once for all queries.
// Then each work item is 32 queries of one head, which pass over the keys that they see.
#pragma once

#include "attention.h"

namespace inflight {

/// Where one chunk's keys and values lie in the workspace, for one layer.
struct Chunk {
  /// The chunk's queries, and the keys that any of them sees; `first_key` is a multiple of 128.
  int64_t first_token, num_tokens, first_key, num_keys;
  const int32_t* blocks;
  /// Places in the workspace, of the first head; each head has `padded_keys` keys, and as many values.
  int64_t keys, values;

  int64_t padded_keys() const { return round_up(num_keys, PANEL); }
  /// Where the keys end that the first query sees, and that all queries see.
  int64_t first_end() const { return end() - num_tokens + 1; }
  int64_t end() const { return first_key + num_keys; }
};

/// The chunk of prefill `row`, placed in a workspace of which `used` elements are taken; adds its own to them.
inline Chunk find_chunk(const Attention& op, const Batch& batch, int64_t row, int64_t& used) {
  Chunk chunk;
  chunk.first_token = batch.prefill_starts[row];
  chunk.num_tokens = batch.prefill_starts[row + 1] - chunk.first_token;
  const int64_t num_keys = batch.prefill_lens[row];
  chunk.first_key = first_key(op, num_keys - chunk.num_tokens + 1) / KEYS_AT_ONCE * KEYS_AT_ONCE;
  chunk.num_keys = num_keys - chunk.first_key;
  chunk.blocks = blocks_of(batch, op.cache, batch.prefill_rows[row]);
  const int64_t count = chunk.padded_keys() * op.cache.num_kv_heads;
  chunk.keys = used;
  chunk.values = used + count * op.cache.head_dim;
  used += count * (op.cache.head_dim + op.cache.value_dim);
  return chunk;
}

/// Elements of the workspace that the operation needs: for all chunks, up to the program's limit, but at least for the
/// largest one.
inline int64_t count_packed(const Attention& op, const Batch& batch, const Program& program) {
  int64_t total = 0, largest = 0;
  for (int64_t row = 0; row < batch.num_prefills; ++row) {
    const int64_t before = total;
    find_chunk(op, batch, row, total);
    largest = std::max(largest, total - before);
  }
  return std::max(std::min(total, program.packed_at_once), largest);
}

/// Attention of 32 queries of one head, from `start` of the chunk on.
inline void attend_queries(const Attention& op, const Run& step, const Chunk& chunk, int64_t head, int64_t start) {
  const int64_t head_dim = op.cache.head_dim, value_dim = op.cache.value_dim;
  const int64_t padded = chunk.padded_keys(), kv_head = head / queries_per_key(op);
  const Element* keys = step.packed + chunk.keys + kv_head * padded * head_dim;
  const Element* values = step.packed + chunk.values + kv_head * padded * value_dim;
  const auto find = [&](int64_t key) {
    const int64_t place = key - chunk.first_key;
    return Panels{keys + place * head_dim, values + panel_elements(place), panel_elements(padded)};
  };
  const int64_t row = step.batch.num_decodes + chunk.first_token + start, end = chunk.first_end() + start;
  const int64_t stride = step.stride(op.queries), count = std::min(QUERIES_AT_ONCE, chunk.num_tokens - start);
  const Queries queries{step.at(op.queries) + row * stride + head * head_dim, stride, count, begin_of(op, end), end, 1};

  Attending attending(op, step, queries);
  Gathered gathered, added;
  const int64_t first_part = first_key(op, end) / KEYS_OF_PART * KEYS_OF_PART;
  attending.gather_part(first_part, find, gathered);
  for (int64_t part = first_part + KEYS_OF_PART; part < queries.end_of_last(); part += KEYS_OF_PART) {
    attending.gather_part(part, find, added);
    gathered.add(added, count, value_dim);
  }
  for (int64_t query = 0; query < count; ++query)
    finish(op, head, gathered.sums + query * value_dim, gathered.maxima[query], gathered.totals[query],
           step.at(op.out) + (row + query) * step.stride(op.out) + head * value_dim);
}

/// Chunks of prefills `first` to `end`, for whose keys and values the workspace has room.
inline void attend_chunks(const Attention& op, const Run& step, int64_t first, int64_t end) {
  int64_t used = 0;
  for (int64_t row = first; row < end; ++row) {
    const Chunk chunk = find_chunk(op, step.batch, row, used);
    share_and_go_on(ceil_div(chunk.num_keys, PANEL) * op.cache.num_kv_heads, [&](int64_t item) {
      const int64_t kv_head = item % op.cache.num_kv_heads, start = item / op.cache.num_kv_heads * PANEL;
      const int64_t head_dim = op.cache.head_dim, before = kv_head * chunk.padded_keys();
      pack_keys_and_values(op, chunk.blocks, kv_head, chunk.first_key + start, chunk.end(),
                           step.packed + chunk.keys + (before + start) * head_dim,
                           step.packed + chunk.values + before * op.cache.value_dim + panel_elements(start),
                           panel_elements(chunk.padded_keys()));
    });
  }
  wait_for_all();
  used = 0;
  for (int64_t row = first; row < end; ++row) {
    const Chunk chunk = find_chunk(op, step.batch, row, used);
    const int64_t tiles = ceil_div(chunk.num_tokens, QUERIES_AT_ONCE);
    // Late queries see most keys: they go first, so that no thread is left alone with one.
    share_and_go_on(tiles * op.num_heads, [&](int64_t item) {
      attend_queries(op, step, chunk, item % op.num_heads, (tiles - 1 - item / op.num_heads) * QUERIES_AT_ONCE);
    });
  }
  wait_for_all();
}

inline void run_prefill(const Attention& op, const Run& step) {
  const int64_t room = count_packed(op, step.batch, step.program);
  for (int64_t first = 0, end; first < step.batch.num_prefills; first = end) {
    int64_t used = 0;
    for (end = first; end < step.batch.num_prefills; ++end) {
      find_chunk(op, step.batch, end, used);
      if (used > room) break;
    }
    attend_chunks(op, step, first, end);
  }
}

}  // namespace inflight
