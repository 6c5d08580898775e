// Attention of one new token a row over the paged cache.
//
// The context of a row is divided into parts, so that a few rows keep all threads busy. A work item is one part for the
// query heads of one key head. For each query head it yields the softmax-weighted sum of its values, its largest score
// and its sum of weights; these are merged afterwards, as in flash decoding.
#pragma once

#include "linear.h"

namespace inflight {

constexpr int64_t CONTEXT_AT_ONCE = 64, MAX_PARTS = 64;

/// The keys that a row's token sees end at its length; this is the first.
inline int64_t first_key(const Attention& op, int64_t length) {
  return op.sliding_window ? std::max<int64_t>(length - op.sliding_window, 0) : 0;
}

/// Keys in each part of a context of `num_keys`. It depends on nothing else: a row's sums have one order, and so the
/// same bits, whatever other rows and however many threads there are.
inline int64_t part_length(int64_t num_keys) {
  return std::max(2 * CONTEXT_AT_ONCE, round_up(ceil_div(num_keys, MAX_PARTS), CONTEXT_AT_ONCE));
}

inline int64_t count_parts(int64_t num_keys) { return ceil_div(num_keys, part_length(num_keys)); }

/// The parts of the row that has most.
inline int64_t most_parts(const Attention& op, const Batch& batch) {
  int64_t most = 1;
  for (int64_t row = 0; row < batch.num_decodes; ++row) {
    const int64_t length = batch.decode_lens[row];
    most = std::max(most, count_parts(length - first_key(op, length)));
  }
  return most;
}

/// Floats of one head's result of a part: head_dim weighted values, then the maximum and the sum of weights.
inline int64_t part_size(const Attention& op) { return op.cache.head_dim + 16; }

/// Floats that the operation needs for all results of its parts.
inline int64_t count_part_floats(const Attention& op, const Batch& batch) {
  return batch.num_decodes * op.num_heads * most_parts(op, batch) * part_size(op);
}

/// Dot products of one query with 16 keys. Results for keys from `count` on are meaningless.
inline Floats dot(const Bf16* query, const Bf16* const* keys, int64_t count, int64_t head_dim) {
  Floats sums[16];
  for (int64_t n = 0; n < 16; ++n) {
    const Bf16* key = keys[std::min(n, count - 1)];
    __m512 sum = splat(0.0f);
    for (int64_t i = 0; i < head_dim; i += PANEL)
      sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_loadu_si512(query + i)),
                             reinterpret_cast<__m512bh>(_mm512_loadu_si512(key + i)));
    sums[n] = sum;
  }
  return sums_of(sums);
}

/// One step of the online softmax: replaces the scores of one query by weights, 2 ** (score - maximum), and updates the
/// running maximum and sum of weights. Returns the factor for what was accumulated under the old maximum.
inline float soften(float* scores, int64_t count, float& maximum, float& total) {
  Floats largest = splat(MASKED), added = splat(0.0f);
  for (int64_t n = 0; n < count; n += 16) largest = _mm512_max_ps(largest, _mm512_load_ps(scores + n));
  const float now = std::max(maximum, _mm512_reduce_max_ps(largest));
  for (int64_t n = 0; n < count; n += 16) {
    const Floats weight = exp2(_mm512_sub_ps(_mm512_load_ps(scores + n), splat(now)));
    _mm512_store_ps(scores + n, weight);
    added = _mm512_add_ps(added, weight);
  }
  const float kept = _mm512_cvtss_f32(exp2(splat(maximum - now)));
  total = total * kept + _mm512_reduce_add_ps(added);
  maximum = now;
  return kept;
}

/// sums of each query = sums * kept + weights @ values. Each value is read once for all QUERIES.
template <int QUERIES>
inline void gather(const float (*weights)[CONTEXT_AT_ONCE], const Bf16* const* values, int64_t count, int64_t head_dim,
                   const float* kept, float* sums, int64_t stride) {
  for (int64_t i = 0; i < head_dim; i += 32) {
    Floats low[QUERIES], high[QUERIES];
    for (int query = 0; query < QUERIES; ++query) {
      low[query] = _mm512_mul_ps(_mm512_loadu_ps(sums + query * stride + i), splat(kept[query]));
      high[query] = _mm512_mul_ps(_mm512_loadu_ps(sums + query * stride + i + 16), splat(kept[query]));
    }
    for (int64_t n = 0; n < count; ++n) {
      const Floats first = load(values[n] + i), second = load(values[n] + i + 16);
      for (int query = 0; query < QUERIES; ++query) {
        low[query] = _mm512_fmadd_ps(splat(weights[query][n]), first, low[query]);
        high[query] = _mm512_fmadd_ps(splat(weights[query][n]), second, high[query]);
      }
    }
    for (int query = 0; query < QUERIES; ++query) {
      _mm512_storeu_ps(sums + query * stride + i, low[query]);
      _mm512_storeu_ps(sums + query * stride + i + 16, high[query]);
    }
  }
}

/// Attention of QUERIES heads, which share one key head, to keys `begin` to `end` of a row: one part for each of them.
template <int QUERIES>
inline void attend_part(const Attention& op, const int32_t* blocks, int64_t begin, int64_t end, int64_t kv_head,
                        const Bf16* queries, float* parts, int64_t stride) {
  const int64_t head_dim = op.cache.head_dim;
  const Floats scale = splat(op.scale * LOG2_E);
  for (int query = 0; query < QUERIES; ++query) {
    float* part = parts + query * stride;
    std::fill(part, part + head_dim, 0.0f);
    part[head_dim] = MASKED;
    part[head_dim + 1] = 0.0f;
  }
  for (int64_t start = begin; start < end; start += CONTEXT_AT_ONCE) {
    const int64_t count = std::min(CONTEXT_AT_ONCE, end - start);
    const Bf16 *keys[CONTEXT_AT_ONCE], *values[CONTEXT_AT_ONCE];
    for (int64_t n = 0; n < count; ++n) {
      const int64_t offset = op.cache.offset(blocks, start + n, kv_head);
      keys[n] = op.cache.keys + offset;
      values[n] = op.cache.values + offset;
    }
    alignas(64) float weights[QUERIES][CONTEXT_AT_ONCE];
    float kept[QUERIES];
    for (int query = 0; query < QUERIES; ++query) {
      for (int64_t n = 0; n < count; n += 16) {
        const Floats products = dot(queries + query * head_dim, keys + n, count - n, head_dim);
        _mm512_store_ps(weights[query] + n, _mm512_mask_mul_ps(splat(MASKED), first_lanes(count - n), products, scale));
      }
      float* state = parts + query * stride + head_dim;
      kept[query] = soften(weights[query], count, state[0], state[1]);
    }
    gather<QUERIES>(weights, values, count, head_dim, kept, parts, stride);
  }
}

/// The same for all query heads of a key head.
inline void attend_part(const Attention& op, const int32_t* blocks, int64_t begin, int64_t end, int64_t kv_head,
                        const Bf16* queries, float* parts, int64_t stride) {
  const int64_t num_queries = op.queries_per_key();
  for (int64_t query = 0, count; query < num_queries; query += count) {
    count = std::min<int64_t>(num_queries - query, 4);
    const auto attend = count == 4   ? attend_part<4>
                        : count == 3 ? attend_part<3>
                        : count == 2 ? attend_part<2>
                                     : attend_part<1>;
    attend(op, blocks, begin, end, kv_head, queries + query * op.cache.head_dim, parts + query * stride, stride);
  }
}

/// Merge the parts of one head of one row, `stride` floats apart.
inline void merge_parts(const float* parts, int64_t num_parts, int64_t stride, int64_t head_dim, Bf16* out) {
  float maximum = MASKED, total = 0.0f, weights[MAX_PARTS];
  for (int64_t part = 0; part < num_parts; ++part) maximum = std::max(maximum, parts[part * stride + head_dim]);
  for (int64_t part = 0; part < num_parts; ++part) {
    weights[part] = _mm512_cvtss_f32(exp2(splat(parts[part * stride + head_dim] - maximum)));
    total += weights[part] * parts[part * stride + head_dim + 1];
  }
  for (int64_t i = 0; i < head_dim; i += 16) {
    Floats sum = splat(0.0f);
    for (int64_t part = 0; part < num_parts; ++part)
      sum = _mm512_fmadd_ps(splat(weights[part]), _mm512_loadu_ps(parts + part * stride + i), sum);
    store(out + i, _mm512_div_ps(sum, splat(total)));
  }
}

inline void run_decode(const Attention& op, const Run& step) {
  const Batch& batch = step.batch;
  const int64_t most = most_parts(op, batch), num_kv_heads = op.cache.num_kv_heads, num_rows = batch.num_decodes;
  const int64_t size = part_size(op), of_head = most * size, head_dim = op.cache.head_dim;
  const auto merge = [&](int64_t row, int64_t head) {
    const int64_t length = batch.decode_lens[row],
                  num_parts = std::max<int64_t>(count_parts(length - first_key(op, length)), 1);
    merge_parts(step.parts + (row * op.num_heads + head) * of_head, num_parts, size, head_dim,
                step.at(op.out) + row * step.stride(op.out) + head * head_dim);
  };
  share(num_rows * num_kv_heads * most, [&](int64_t item) {
    const int64_t kv_head = item % num_kv_heads, row = item / num_kv_heads % num_rows;
    const int64_t part = item / num_kv_heads / num_rows, head = kv_head * op.queries_per_key();
    const int64_t length = batch.decode_lens[row], first = first_key(op, length);
    const int64_t begin = first + part * part_length(length - first);
    if (part > 0 && begin >= length) return;
    const int64_t end = std::min(begin + part_length(length - first), length);
    attend_part(op, batch.decode_table + row * batch.decode_width, begin, end, kv_head,
                step.at(op.queries) + row * step.stride(op.queries) + head * head_dim,
                step.parts + (row * op.num_heads + head) * of_head + part * size, of_head);
    if (most > 1) return;
    for (int64_t query = 0; query < op.queries_per_key(); ++query) merge(row, head + query);
  });
  if (most == 1) return;
  share(num_rows * op.num_heads, [&](int64_t item) { merge(item / op.num_heads, item % op.num_heads); });
}

}  // namespace inflight
