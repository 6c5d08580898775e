// What happens to each token by itself: norms, rotation, the way into the KV cache.
#pragma once

#include <cmath>
#include <cstring>

#include "linear.h"
#include "network.h"

namespace inflight {

/// y = x / sqrt(mean(x ** 2) + eps) * weight of one row, rounded before the weight and after it. `size` is a multiple
/// of 16; y may be x.
inline void rms_norm(const Bf16* x, const Bf16* weight, int64_t size, float eps, Bf16* y) {
  Floats squares = splat(0.0f);
  for (int64_t i = 0; i < size; i += 16) squares = _mm512_fmadd_ps(load(x + i), load(x + i), squares);
  const Floats factor = splat(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + eps));
  for (int64_t i = 0; i < size; i += 16)
    store(y + i, _mm512_mul_ps(rounded(_mm512_mul_ps(load(x + i), factor)), load(weight + i)));
}

/// residual += hidden, normed = norm(residual), for all rows.
inline void add_norm(const Bf16* hidden, Bf16* residual, const Bf16* weight, int64_t num_rows, int64_t size, float eps,
                     Bf16* normed) {
  share(num_rows, [&](int64_t row) {
    const Bf16* added = hidden + row * size;
    Bf16* sum = residual + row * size;
    for (int64_t i = 0; i < size; i += 16) store(sum + i, _mm512_add_ps(load(sum + i), load(added + i)));
    rms_norm(sum, weight, size, eps, normed + row * size);
  });
}

/// Rotate the first `rotary_dim` elements of a head, element i with element i + rotary_dim / 2; y may be x.
inline void rotate(const Bf16* x, const float* cos_sin, int64_t rotary_dim, int64_t head_dim, Bf16* y) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const __mmask16 lanes = first_lanes(half - i);
    const Floats first = load(x + i, lanes), second = load(x + half + i, lanes);
    const Floats cos = _mm512_maskz_loadu_ps(lanes, cos_sin + i),
                 sin = _mm512_maskz_loadu_ps(lanes, cos_sin + half + i);
    store(y + i, _mm512_fnmadd_ps(second, sin, _mm512_mul_ps(first, cos)), lanes);
    store(y + half + i, _mm512_fmadd_ps(first, sin, _mm512_mul_ps(second, cos)), lanes);
  }
  if (x != y) std::memcpy(y + rotary_dim, x + rotary_dim, (head_dim - rotary_dim) * sizeof(Bf16));
}

/// Rotate the queries of `qkv` where they are; rotate keys into the cache; copy values there.
inline void rope_and_write(const Network& network, const Layer& layer, const Batch& batch, Bf16* qkv) {
  const int64_t head_dim = network.head_dim, first_key = network.num_heads;
  const int64_t first_value = first_key + network.num_kv_heads, heads = first_value + network.num_kv_heads;
  share(batch.num_tokens, [&](int64_t token) {
    const float* cos_sin = network.cos_sin + batch.positions[token] * network.rotary_dim;
    const int64_t slot = batch.slots[token];
    for (int64_t head = 0; head < heads; ++head) {
      Bf16* x = qkv + (token * heads + head) * head_dim;
      if (head < first_key) {
        if (layer.q_norm) rms_norm(x, layer.q_norm, head_dim, network.head_norm_eps, x);
        rotate(x, cos_sin, network.rotary_dim, head_dim, x);
      } else if (slot >= 0 && head < first_value) {
        if (layer.k_norm) rms_norm(x, layer.k_norm, head_dim, network.head_norm_eps, x);
        Bf16* key = layer.keys + (slot * network.num_kv_heads + head - first_key) * head_dim;
        rotate(x, cos_sin, network.rotary_dim, head_dim, key);
      } else if (slot >= 0) {
        Bf16* value = layer.values + (slot * network.num_kv_heads + head - first_value) * head_dim;
        std::memcpy(value, x, head_dim * sizeof(Bf16));
      }
    }
  });
}

}  // namespace inflight
