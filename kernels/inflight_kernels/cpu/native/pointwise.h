// Operations on each token by itself: embedding, sums, activation, norms, rotation, writing to the KV cache.
#pragma once

#include <cmath>
#include <cstring>

#include "linear.h"

namespace inflight {

/// y = x / sqrt(mean(x ** 2) + eps) * weight of one row, rounded before the weight and after it. `size` is a multiple
/// of 16; y may be x.
inline void rms_norm(const Element* x, const Element* weight, int64_t size, float eps, Element* y) {
  Floats squares = splat(0.0f);
  for (int64_t i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const Floats factor = splat(1.0f / std::sqrt(sum(squares) / size + eps));
  for (int64_t i = 0; i < size; i += 16) store(y + i, rounded(load(x + i) * factor) * load(weight + i));
}

inline void run(const Embedding& op, const Run& step) {
  Element* const out = step.at(op.out);
  const Batch& batch = step.batch;
  share(batch.num_tokens, [&](int64_t row) {
    const Element* source = nullptr;
    if (batch.given && batch.given[row] >= 0) {
      if (op.first == 0) source = batch.given_rows + batch.given[row] * op.size;
    } else {
      const int64_t local = batch.token_ids[row] - op.first;
      if (local >= 0 && local < op.num_rows) source = op.table + local * op.size;
    }
    Element* const to = out + row * step.stride(op.out);
    if (source)
      std::memcpy(to, source, op.size * sizeof(Element));
    else
      std::memset(to, 0, op.size * sizeof(Element));
  });
}

inline void run(const Sum& op, const Run& step) { step.ranks.sum(step.at(op.x), step.batch.num_tokens * op.size); }

inline void run(const Gather& op, const Run& step) {
  step.ranks.gather(reinterpret_cast<const char*>(step.at(op.x)), step.batch.num_tokens, op.size * sizeof(Element),
                    reinterpret_cast<char*>(step.at(op.out)));
}

inline void run(const AddDelta& op, const Run& step) {
  const Deltas deltas(op.delta, step);
  share(step.batch.num_tokens, [&](int64_t row) {
    if (!deltas.has(row)) return;
    Element* const x = step.at(op.x) + row * step.stride(op.x);
    for (int64_t i = 0; i < op.size; i += 16) {
      const int64_t count = op.size - i;
      store(x + i, deltas.add(row, i, count, load(x + i, count)), count);
    }
  });
}

inline void run(const SiluAndMul& op, const Run& step) {
  share(step.batch.num_tokens, [&](int64_t row) {
    const Element* const gate = step.at(op.x) + row * step.stride(op.x);
    Element* const out = step.at(op.out) + row * step.stride(op.out);
    for (int64_t i = 0; i < round_up(op.size, PANEL); i += 16) {
      // What is not loaded is 0, and so is silu(0) * 0.
      const int64_t count = std::max<int64_t>(op.size - i, 0);
      store(out + i, rounded(silu(load(gate + i, count))) * load(gate + op.size + i, count));
    }
  });
}

inline void run(const Scale& op, const Run& step) {
  share(step.batch.num_tokens, [&](int64_t row) {
    const Element* const x = step.at(op.x) + row * step.stride(op.x);
    Element* const out = step.at(op.out) + row * step.stride(op.out);
    for (int64_t i = 0; i < op.size; i += 16) store(out + i, load(x + i, op.size - i) * splat(op.factor), op.size - i);
  });
}

/// `sum` may be in the buffer of `x` or of `residual`, and `out` in the other one.
inline void run(const RmsNorm& op, const Run& step) {
  const bool adds = op.residual.buffer >= 0;
  share(step.batch.num_tokens, [&](int64_t row) {
    const auto row_of = [&](const Value& value) { return step.at(value) + row * step.stride(value); };
    const Element* x = row_of(op.x);
    if (adds) {
      const Element* residual = row_of(op.residual);
      Element* sum = row_of(op.sum);
      for (int64_t i = 0; i < op.size; i += 16) store(sum + i, load(residual + i) + load(x + i));
      x = sum;
    }
    rms_norm(x, op.weight, op.size, op.eps, row_of(op.out));
  });
}

/// Without a weight `out` is the sum itself, of which a rank has all rows there only.
inline void run_norm_of_sum(const RmsNorm& op, const Run& step) {
  const RankSegment& ranks = step.ranks;
  const int64_t num_rows = step.batch.num_tokens;
  const int64_t first = step.splits_rows ? num_rows * ranks.rank() / ranks.size() : 0;
  const int64_t end = step.splits_rows ? num_rows * (ranks.rank() + 1) / ranks.size() : num_rows;
  ranks.meet();
  share(end - first, [&](int64_t item) {
    const auto row_of = [&](const Value& value) { return step.at(value) + (first + item) * step.stride(value); };
    const Element *x = row_of(op.x), *residual = row_of(op.residual);
    Element* sum = row_of(op.sum);
    for (int64_t i = 0; i < op.size; i += 16) {
      Floats total = load(ranks.of(0, x) + i);
      for (int64_t other = 1; other < ranks.size(); ++other) total = total + load(ranks.of(other, x) + i);
      store(sum + i, load(residual + i) + rounded(total));
    }
    if (op.weight)
      rms_norm(sum, op.weight, op.size, op.eps, row_of(op.out));
    else
      std::memcpy(row_of(op.out), sum, op.size * sizeof(Element));
  });
  if (step.splits_rows) ranks.meet();
}

/// Rotate the first `rotary_dim` elements of a head, element i with element i + rotary_dim / 2; y may be x.
inline void rotate(const Element* x, const float* cos_sin, int64_t rotary_dim, int64_t head_dim, Element* y) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t count = half - i;
    const Floats first = load(x + i, count), second = load(x + half + i, count);
    const Floats cos = load(cos_sin + i, count), sin = load(cos_sin + half + i, count);
    store(y + i, fnma(second, sin, first * cos), count);
    store(y + half + i, fma(first, sin, second * cos), count);
  }
  if (x != y) std::memcpy(y + rotary_dim, x + rotary_dim, (head_dim - rotary_dim) * sizeof(Element));
}

inline void run(const RopeAndKvWrite& op, const Run& step) {
  const int64_t head_dim = op.cache.head_dim;
  share(step.batch.num_tokens, [&](int64_t token) {
    const auto row_of = [&](const Value& value) { return step.at(value) + token * step.stride(value); };
    const float* cos_sin = op.cos_sin + step.batch.positions[token] * op.rotary_dim;
    Element* query = row_of(op.queries);
    for (int64_t head = 0; head < op.num_heads; ++head, query += head_dim) {
      if (op.query_norm) rms_norm(query, op.query_norm, head_dim, op.norm_eps, query);
      rotate(query, cos_sin, op.rotary_dim, head_dim, query);
    }
    const int64_t slot = step.batch.slots[token];
    if (slot < 0) return;
    Element* key = row_of(op.keys);
    for (int64_t head = 0; head < op.cache.num_kv_heads; ++head, key += head_dim) {
      if (op.key_norm) rms_norm(key, op.key_norm, head_dim, op.norm_eps, key);
      rotate(key, cos_sin, op.rotary_dim, head_dim, op.cache.keys + offset_in(op.cache, slot, head));
    }
    std::memcpy(op.cache.values + offset_in(op.cache, slot, 0), row_of(op.values),
                op.cache.num_kv_heads * head_dim * sizeof(Element));
  });
}

}  // namespace inflight
