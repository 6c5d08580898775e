// What the functions of decoder.cpp are given. decoder_stack.py has the same structures, field by field.
#pragma once

#include "products.h"

namespace inflight {

/// Sizes that all layers share. hidden, head_dim and intermediate are multiples of 32.
struct Network {
  int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate;
  /// Leading elements of a head that are rotated.
  int64_t rotary_dim;
  /// Tokens of a block of the KV cache.
  int64_t block_size;
  Instructions instructions;
  /// Elements of keys and values that prompts may have packed at the same time; a single chunk may have more.
  int64_t packed_at_once;
  float scale, norm_eps, head_norm_eps;
  /// (hidden)
  const Bf16* norm;
  /// (positions, rotary_dim): cosines, then sines.
  const float* cos_sin;

  int64_t query_size() const { return num_heads * head_dim; }
  int64_t qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  int64_t queries_of_key() const { return num_heads / num_kv_heads; }
};

/// Weights of one layer, products' as `pack_weight` lays them out; null for a bias or norm that it does not have.
struct Layer {
  const Bf16 *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *output, *output_bias, *post_norm, *gate_up, *gate_up_bias,
      *down, *down_bias;
  /// (blocks, block_size, num_kv_heads, head_dim)
  Bf16 *keys, *values;
  /// Last keys that a token sees, itself included; 0: all.
  int64_t sliding_window;
};

/// Tokens of a step: one of each decoding row, then the chunks of prefilling rows.
struct Batch {
  int64_t num_tokens, num_decodes, num_prefills;
  /// (num_tokens): place in the sequence; place in the cache, negative for none.
  const int64_t *positions, *slots;
  /// (num_decodes, decode_width) and (num_decodes)
  const int32_t *decode_table, *decode_lens;
  int64_t decode_width;
  /// (num_prefills, prefill_width), (num_prefills) and (num_prefills + 1), counted from the first prefilling token.
  const int32_t *prefill_table, *prefill_lens, *prefill_starts;
  int64_t prefill_width;
};

/// Where the key or value of token `place` lies, for one head of the cache.
inline int64_t cache_offset(const Network& network, const int32_t* blocks, int64_t place, int64_t head) {
  const int64_t slot = blocks[place / network.block_size] * network.block_size + place % network.block_size;
  return (slot * network.num_kv_heads + head) * network.head_dim;
}

/// The score of a key that a query does not see. Finite: two of them may be subtracted.
constexpr float MASKED = -1e30f;

}  // namespace inflight
