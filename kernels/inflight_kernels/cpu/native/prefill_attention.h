// Causal attention of prompt chunks over the paged cache: flash attention in products with panels.
//
// First the keys and values of as many chunks as the workspace has room for are packed as panels, once for all queries.
// Then each work item is 32 queries of one head: they pass over the keys that they see, 128 at a time, with a running
// maximum and sum of weights for each query (online softmax).
#pragma once

#include "linear.h"

namespace inflight {

constexpr int64_t QUERIES_AT_ONCE = 32, KEYS_AT_ONCE = 128, MAX_HEAD_DIM = 256;

/// Where one chunk's keys and values lie in the workspace, for one layer.
struct Chunk {
  /// The chunk's queries, and the keys that any of them sees; `first_key` is a multiple of 32.
  int64_t first_token, num_tokens, first_key, num_keys;
  const int32_t* blocks;
  /// Places in the workspace, of the first head; each head has `padded_keys * head_dim` elements of both.
  int64_t keys, values;

  int64_t padded_keys() const { return round_up(num_keys, PANEL); }
  int64_t first_position() const { return first_key + num_keys - num_tokens; }
};

/// The chunk of prefill `row`, placed in a workspace of which `used` elements are taken; adds its own to them.
inline Chunk find_chunk(const Attention& op, const Batch& batch, int64_t row, int64_t& used) {
  Chunk chunk;
  chunk.first_token = batch.prefill_starts[row];
  chunk.num_tokens = batch.prefill_starts[row + 1] - chunk.first_token;
  const int64_t num_keys = batch.prefill_lens[row], before = num_keys - chunk.num_tokens + 1 - op.sliding_window;
  chunk.first_key = op.sliding_window && before > 0 ? before / PANEL * PANEL : 0;
  chunk.num_keys = num_keys - chunk.first_key;
  chunk.blocks = batch.prefill_table + row * batch.prefill_width;
  const int64_t elements = chunk.padded_keys() * op.cache.num_kv_heads * op.cache.head_dim;
  chunk.keys = used;
  chunk.values = used + elements;
  used += 2 * elements;
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

/// Lay out 32 keys and values of one head, from `start` of the chunk on.
inline void pack_keys_and_values(const Attention& op, const Chunk& chunk, int64_t head, int64_t start,
                                 Bf16* workspace) {
  const int64_t head_dim = op.cache.head_dim, of_head = chunk.padded_keys() * head_dim;
  const Bf16 *keys[PANEL], *values[PANEL];
  for (int64_t i = 0; i < PANEL; ++i) {
    const int64_t place = chunk.first_key + start + i;
    const bool is_there = start + i < chunk.num_keys;
    const int64_t offset = is_there ? op.cache.offset(chunk.blocks, place, head) : 0;
    keys[i] = is_there ? op.cache.keys + offset : nullptr;
    values[i] = is_there ? op.cache.values + offset : nullptr;
  }
  Bf16* key_panel = workspace + chunk.keys + head * of_head + start * head_dim;
  for (int64_t i = 0; i < head_dim; i += PANEL) {
    pack_rows(keys, key_panel + panel_elements(i));
    Bf16* value_panel = workspace + chunk.values + head * of_head + chunk.padded_keys() * i;
    pack_columns(values, value_panel + panel_elements(start));
    for (int64_t n = 0; n < PANEL; ++n) {
      if (!keys[n]) continue;
      keys[n] += PANEL;
      values[n] += PANEL;
    }
  }
}

/// The state of the online softmax of 32 queries: weighted values, and the largest score and sum of weights of each.
struct Gathered {
  alignas(64) float sums[QUERIES_AT_ONCE * MAX_HEAD_DIM];
  alignas(64) float maxima[QUERIES_AT_ONCE], totals[QUERIES_AT_ONCE];

  explicit Gathered(int64_t head_dim) {
    std::fill(sums, sums + QUERIES_AT_ONCE * head_dim, 0.0f);
    std::fill(maxima, maxima + QUERIES_AT_ONCE, MASKED);
    std::fill(totals, totals + QUERIES_AT_ONCE, 0.0f);
  }
};

/// Hide from each row the keys before `first` + row, and from `end` + row on.
inline void hide(float* scores, int64_t num_rows, int64_t first, int64_t end) {
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t i = 0; i < KEYS_AT_ONCE; i += 16) {
      const __mmask16 seen = first_lanes(end + row - i) & ~first_lanes(first + row - i);
      _mm512_mask_store_ps(scores + row * KEYS_AT_ONCE + i, ~seen, splat(MASKED));
    }
}

/// One step of the online softmax: replaces the scores of 16 queries by weights, 2 ** (score * scale - maximum), and
/// scales the sums accumulated so far to the new maxima.
inline void soften(const float* scores, float scale, int64_t head_dim, float* sums, float* maxima, float* totals,
                   Bf16* weights) {
  alignas(64) float largest[16], kept[16];
  for (int row = 0; row < 16; ++row) {
    Floats x = _mm512_load_ps(scores + row * KEYS_AT_ONCE);
    for (int i = 16; i < KEYS_AT_ONCE; i += 16) x = _mm512_max_ps(x, _mm512_load_ps(scores + row * KEYS_AT_ONCE + i));
    largest[row] = _mm512_reduce_max_ps(x);
  }
  const Floats before = _mm512_load_ps(maxima);
  const Floats now = _mm512_max_ps(before, _mm512_mul_ps(_mm512_load_ps(largest), splat(scale)));
  const Floats factors = exp2(_mm512_sub_ps(before, now));
  _mm512_store_ps(maxima, now);
  _mm512_store_ps(kept, factors);
  if (_mm512_cmpneq_ps_mask(before, now))
    for (int row = 0; row < 16; ++row)
      for (int64_t i = row * head_dim; i < (row + 1) * head_dim; i += 16)
        _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), splat(kept[row])));

  Floats added[16];
  for (int row = 0; row < 16; ++row) {
    const Floats shift = splat(maxima[row]);
    added[row] = splat(0.0f);
    for (int i = row * KEYS_AT_ONCE; i < (row + 1) * KEYS_AT_ONCE; i += 32) {
      const Floats low = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores + i), splat(scale), shift));
      const Floats high = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores + i + 16), splat(scale), shift));
      added[row] = _mm512_add_ps(added[row], _mm512_add_ps(low, high));
      store(weights + i, low, high);
    }
  }
  _mm512_store_ps(totals, _mm512_fmadd_ps(_mm512_load_ps(totals), factors, sums_of(added)));
}

/// Attention of 32 queries of one head, from `start` of the chunk on.
inline void attend_queries(const Attention& op, const Run& step, const Chunk& chunk, int64_t head, int64_t start) {
  // Zeros: the softmax works on 16 rows at a time, including those after the last query.
  alignas(64) float scores[QUERIES_AT_ONCE * KEYS_AT_ONCE] = {};
  alignas(64) Bf16 weights[QUERIES_AT_ONCE * KEYS_AT_ONCE];
  alignas(64) float wide_queries[QUERIES_AT_ONCE * MAX_HEAD_DIM], wide_weights[QUERIES_AT_ONCE * KEYS_AT_ONCE];
  const int64_t head_dim = op.cache.head_dim, kv_head = head / op.queries_per_key();
  Gathered gathered(head_dim);
  const int64_t count = std::min(QUERIES_AT_ONCE, chunk.num_tokens - start), window = op.sliding_window;
  const int64_t first_row = step.batch.num_decodes + chunk.first_token + start;
  const Bf16* keys = step.packed + chunk.keys + kv_head * chunk.padded_keys() * head_dim;
  const Bf16* values = step.packed + chunk.values + kv_head * chunk.padded_keys() * head_dim;
  const Instruction instruction = step.instructions().of(chunk.num_tokens);
  const Left queries(instruction, step.at(op.queries) + first_row * step.stride(op.queries) + head * head_dim,
                     step.stride(op.queries), count, head_dim, wide_queries);

  // Counted from the chunk's first key: what the first query sees last, and where its window begins.
  const int64_t last_of_first = chunk.first_position() - chunk.first_key + start;
  const int64_t end = std::min(last_of_first + count, chunk.num_keys);
  const int64_t first_of_first = window ? last_of_first + 1 - window : -chunk.num_keys;
  for (int64_t key = std::max<int64_t>(first_of_first, 0) / PANEL * PANEL; key < end; key += KEYS_AT_ONCE) {
    const int64_t num_keys = std::min(round_up(end - key, PANEL), KEYS_AT_ONCE);
    for (int64_t i = 0; i < num_keys; i += PANEL)
      queries.multiply<false>(keys + (key + i) * head_dim, head_dim / PANEL, scores + i, KEYS_AT_ONCE);
    const bool all_seen = key + KEYS_AT_ONCE <= last_of_first + 1 && key >= first_of_first + count;
    if (!all_seen) hide(scores, QUERIES_AT_ONCE, first_of_first - key, last_of_first + 1 - key);
    for (int64_t row = 0; row < count; row += 16)
      soften(scores + row * KEYS_AT_ONCE, op.scale * LOG2_E, head_dim, gathered.sums + row * head_dim,
             gathered.maxima + row, gathered.totals + row, weights + row * KEYS_AT_ONCE);
    const Left weighing(instruction, weights, KEYS_AT_ONCE, count, KEYS_AT_ONCE, wide_weights);
    for (int64_t i = 0; i < head_dim; i += PANEL)
      weighing.multiply<true>(values + chunk.padded_keys() * i + panel_elements(key), num_keys / PANEL,
                              gathered.sums + i, head_dim);
  }
  for (int64_t row = 0; row < count; ++row) {
    const Floats total = splat(gathered.totals[row]);
    Bf16* attended = step.at(op.out) + (first_row + row) * step.stride(op.out) + head * head_dim;
    for (int64_t i = 0; i < head_dim; i += 16)
      store(attended + i, _mm512_div_ps(_mm512_load_ps(gathered.sums + row * head_dim + i), total));
  }
}

/// Chunks of prefills `first` to `end`, for whose keys and values the workspace has room.
inline void attend_chunks(const Attention& op, const Run& step, int64_t first, int64_t end) {
  int64_t used = 0;
  for (int64_t row = first; row < end; ++row) {
    const Chunk chunk = find_chunk(op, step.batch, row, used);
    share_and_go_on(ceil_div(chunk.num_keys, PANEL) * op.cache.num_kv_heads, [&](int64_t item) {
      pack_keys_and_values(op, chunk, item % op.cache.num_kv_heads, item / op.cache.num_kv_heads * PANEL, step.packed);
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
