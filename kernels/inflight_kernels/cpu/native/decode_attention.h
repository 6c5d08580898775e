// Attention of one new token a row over the paged cache.
//
// A row's context is cut into parts, so that few rows keep all threads busy; an item is one part for the query heads of
// one key head. What the parts give, (weighted values, maximum, total) a head, is merged afterwards.
#pragma once

#include "linear.h"
#include "network.h"

namespace inflight {

constexpr int64_t CONTEXT_AT_ONCE = 64, MAX_PARTS = 64;

/// How many parts the rows of a batch are cut into.
inline int64_t count_parts(const Network& network, const Batch& batch, int64_t num_threads) {
  int64_t longest = 0;
  for (int64_t row = 0; row < batch.num_decodes; ++row) longest = std::max<int64_t>(longest, batch.decode_lens[row]);
  const int64_t useful = ceil_div(4 * num_threads, std::max<int64_t>(batch.num_decodes * network.num_kv_heads, 1));
  return std::max<int64_t>(std::min({useful, ceil_div(longest, 2 * CONTEXT_AT_ONCE), MAX_PARTS}), 1);
}

/// Floats that a part leaves for each head: head_dim weighted values, then maximum and total.
inline int64_t part_size(const Network& network) { return network.head_dim + 16; }

/// Dot products of one query with 16 keys; what keys past `count` give means nothing.
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

/// Scores of one query made weights, 2 ** (score - largest); what its part held before is to be scaled by what it
/// gives.
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

/// sums of each query = sums * kept + weights @ values: a value is read once for all QUERIES.
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

/// Keys `begin` to `end` of a row for QUERIES heads of one key head, into one part for each of them.
template <int QUERIES>
inline void attend_part(const Network& network, const Layer& layer, const int32_t* blocks, int64_t begin, int64_t end,
                        int64_t kv_head, const Bf16* queries, float* parts, int64_t stride) {
  const int64_t head_dim = network.head_dim;
  const Floats scale = splat(network.scale * LOG2_E);
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
      const int64_t offset = cache_offset(network, blocks, start + n, kv_head);
      keys[n] = layer.keys + offset;
      values[n] = layer.values + offset;
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

/// The same for any number of heads.
inline void attend_part(const Network& network, const Layer& layer, const int32_t* blocks, int64_t begin, int64_t end,
                        int64_t kv_head, const Bf16* queries, float* parts, int64_t stride) {
  const int64_t num_queries = network.queries_of_key();
  for (int64_t query = 0, count; query < num_queries; query += count) {
    count = std::min<int64_t>(num_queries - query, 4);
    const auto attend = count == 4   ? attend_part<4>
                        : count == 3 ? attend_part<3>
                        : count == 2 ? attend_part<2>
                                     : attend_part<1>;
    attend(network, layer, blocks, begin, end, kv_head, queries + query * network.head_dim, parts + query * stride,
           stride);
  }
}

/// One head of one row: its parts, `stride` floats apart, weighed by their totals.
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

/// All decoding rows. `workspace` has room for `num_parts` parts of each head of each row.
inline void decode_attention(const Network& network, const Layer& layer, const Batch& batch, int64_t num_parts,
                             const Bf16* qkv, float* workspace, Bf16* out) {
  const int64_t size = part_size(network), of_head = num_parts * size, head_dim = network.head_dim;
  share(batch.num_decodes * network.num_kv_heads * num_parts, [&](int64_t item) {
    const int64_t part = item % num_parts, kv_head = item / num_parts % network.num_kv_heads;
    const int64_t row = item / num_parts / network.num_kv_heads, head = kv_head * network.queries_of_key();
    const int64_t length = batch.decode_lens[row];
    const int64_t first = layer.sliding_window ? std::max<int64_t>(length - layer.sliding_window, 0) : 0;
    const int64_t begin = first + (length - first) * part / num_parts;
    const int64_t end = first + (length - first) * (part + 1) / num_parts;
    float* parts = workspace + (row * network.num_heads + head) * of_head + part * size;
    attend_part(network, layer, batch.decode_table + row * batch.decode_width, begin, end, kv_head,
                qkv + row * network.qkv_size() + head * head_dim, parts, of_head);
    if (num_parts > 1) return;
    for (int64_t query = 0; query < network.queries_of_key(); ++query)
      merge_parts(parts + query * of_head, 1, size, head_dim,
                  out + (row * network.num_heads + head + query) * head_dim);
  });
  if (num_parts == 1) return;
  share(batch.num_decodes * network.num_heads, [&](int64_t item) {
    merge_parts(workspace + item * of_head, num_parts, size, head_dim, out + item * head_dim);
  });
}

}  // namespace inflight
