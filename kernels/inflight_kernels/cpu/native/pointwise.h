// Operations on each token by itself: embedding, sums, activation, norms, rotation, writing to the KV cache.
#pragma once

#include <cmath>
#include <cstring>

#include "coded_rows.h"
#include "linear.h"

namespace inflight {

inline bool has_values(const NormWeight& weight) { return weight.elements || weight.floats; }

/// y = x / sqrt(mean(x ** 2) + eps) * weight of one row, rounded before the weight, if that has elements, and after it.
/// `size` is a multiple of 16; y may be x.
inline void rms_norm(const Element* x, const NormWeight& weight, int64_t size, float eps, Element* y) {
  Floats squares = splat(0.0f);
  for (int64_t i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const Floats factor = splat(1.0f / std::sqrt(sum(squares) / size + eps));
  if (weight.floats)
    for (int64_t i = 0; i < size; i += 16) store(y + i, load(x + i) * factor * load(weight.floats + i));
  else
    for (int64_t i = 0; i < size; i += 16) store(y + i, rounded(load(x + i) * factor) * load(weight.elements + i));
}

/// y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias of one row, rounded once. y may be x.
inline void layer_norm(const Element* x, const LayerNorm& op, Element* y) {
  Floats total = splat(0.0f), squares = splat(0.0f);
  for (int64_t i = 0; i < op.size; i += 16) total = total + load(x + i);
  const Floats mean = splat(sum(total) / op.size);
  for (int64_t i = 0; i < op.size; i += 16) {
    const Floats centred = load(x + i) - mean;
    squares = fma(centred, centred, squares);
  }
  const Floats factor = splat(1.0f / std::sqrt(sum(squares) / op.size + op.eps));
  for (int64_t i = 0; i < op.size; i += 16) {
    const Floats normed = (load(x + i) - mean) * factor * load(op.weight + i);
    store(y + i, op.bias ? normed + load(op.bias + i) : normed);
  }
}

inline void run(const Embedding& op, const Run& step) {
  Element* const out = step.at(op.out);
  const Batch& batch = step.batch;
  const int64_t* const ids = op.ids == Ids::POSITION ? batch.positions
                             : op.ids == Ids::TYPE   ? batch.token_types
                                                     : batch.token_ids;
  const int64_t* const given = op.ids == Ids::TOKEN ? batch.given : nullptr;
  share(batch.num_tokens, [&](int64_t row) {
    Element* const to = out + row * step.stride(op.out);
    const Element* source = nullptr;
    float factor = 1.0f;
    if (given && given[row] >= 0) {
      if (op.first == 0) source = batch.given_rows + given[row] * op.size;
    } else {
      const int64_t local = (ids ? ids[row] : 0) - op.first;
      factor = op.factor;
      if (local >= 0 && local < op.num_rows) {
        if (!op.table) read_row(op.codes, local, op.size, to);
        source = op.table ? op.table + local * op.size : to;
      }
    }
    if (!source)
      std::memset(to, 0, op.size * sizeof(Element));
    else if (factor == 1.0f)
      std::memmove(to, source, op.size * sizeof(Element));
    else
      for (int64_t i = 0; i < op.size; i += 16)
        store(to + i, load(source + i, op.size - i) * splat(factor), op.size - i);
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

/// Calls `function(row, value)` for each token, where `value(of)` is the token's row of a value.
template <class Function>
inline void by_rows(const Run& step, Function function) {
  share(step.batch.num_tokens,
        [&](int64_t row) { function([&](const Value& value) { return step.at(value) + row * step.stride(value); }); });
}

inline void run_activate_and_mul(const Activate& op, const Run& step) {
  with_activation(op.activation, [&](auto activation) {
    by_rows(step, [&](auto row_of) {
      const Element* const gate = row_of(op.x);
      Element* const out = row_of(op.out);
      for (int64_t i = 0; i < round_up(op.size, PANEL); i += 16) {
        // What is not loaded is 0, and so is f(0) * 0.
        const int64_t count = std::max<int64_t>(op.size - i, 0);
        store(out + i, gated<decltype(activation)::value>(load(gate + i, count), load(gate + op.size + i, count)));
      }
    });
  });
}

inline void run(const Activate& op, const Run& step) {
  with_activation(op.activation, [&](auto activation) {
    if constexpr (decltype(activation)::value != Activation::CLAMPED_SWIGLU)
      by_rows(step, [&](auto row_of) {
        const Element* const x = row_of(op.x);
        Element* const out = row_of(op.out);
        // f(0) is 0.
        for (int64_t i = 0; i < round_up(op.size, PANEL); i += 16)
          store(out + i, activated<decltype(activation)::value>(load(x + i, std::max<int64_t>(op.size - i, 0))));
      });
  });
}

inline void run(const Scale& op, const Run& step) {
  by_rows(step, [&](auto row_of) {
    const Element* const x = row_of(op.x);
    Element* const out = row_of(op.out);
    for (int64_t i = 0; i < op.size; i += 16) store(out + i, load(x + i, op.size - i) * splat(op.factor), op.size - i);
  });
}

inline void run(const Permute& op, const Run& step) {
  by_rows(step, [&](auto row_of) {
    const Element* const x = row_of(op.x);
    Element* const out = row_of(op.out);
    for (int64_t i = 0; i < op.size; ++i) out[i] = x[op.columns[i]];
    std::memset(out + op.size, 0, (round_up(op.size, PANEL) - op.size) * sizeof(Element));
  });
}

inline void run(const SoftCap& op, const Run& step) {
  by_rows(step, [&](auto row_of) {
    const Element* const x = row_of(op.x);
    Element* const out = row_of(op.out);
    const Floats cap = splat(op.cap);
    for (int64_t i = 0; i < op.size; i += 16) store(out + i, cap * tanh(load(x + i, op.size - i) / cap), op.size - i);
  });
}

/// out = combine(x, y), rounded once: an Add, or a Mul, which has its fields.
template <typename Combine>
void run_combined(const Add& op, const Run& step, Combine combine) {
  by_rows(step, [&](auto row_of) {
    const Element *const x = row_of(op.x), *const y = row_of(op.y);
    Element* const out = row_of(op.out);
    for (int64_t i = 0; i < op.size; i += 16)
      store(out + i, combine(load(x + i, op.size - i), load(y + i, op.size - i)), op.size - i);
  });
}

inline void run_add(const Add& op, const Run& step) {
  run_combined(op, step, [](const Floats& x, const Floats& y) { return x + y; });
}

inline void run_mul(const Add& op, const Run& step) {
  run_combined(op, step, [](const Floats& x, const Floats& y) { return x * y; });
}

inline void run(const SigmoidMul& op, const Run& step) {
  by_rows(step, [&](auto row_of) {
    const Element *const x = row_of(op.x), *const gate = row_of(op.gate);
    Element* const out = row_of(op.out);
    const Floats of_all = splat(first_of(sigmoid(load(gate, 1))));
    for (int64_t i = 0; i < op.size; i += 16) {
      const Floats share = op.gate_size == 1 ? of_all : sigmoid(load(gate + i, op.size - i));
      store(out + i, load(x + i, op.size - i) * share, op.size - i);
    }
  });
}

/// Calls `norm(x, out)` for each row of x, or of its sum with the residual. `sum` may be in the buffer of `x` or of
/// `residual`, and `out` in the other one.
template <class Op, class Norm>
inline void add_and_norm(const Op& op, const Run& step, Norm norm) {
  const bool adds = op.residual.buffer >= 0;
  by_rows(step, [&](auto row_of) {
    const Element* x = row_of(op.x);
    if (adds) {
      const Element* residual = row_of(op.residual);
      Element* sum = row_of(op.sum);
      for (int64_t i = 0; i < op.size; i += 16) store(sum + i, load(residual + i) + load(x + i));
      x = sum;
    }
    norm(x, row_of(op.out));
  });
}

inline void run(const RmsNorm& op, const Run& step) {
  add_and_norm(op, step, [&](const Element* x, Element* out) {
    for (int64_t first = 0; first < op.num_groups * op.size; first += op.size)
      rms_norm(x + first, op.weight, op.size, op.eps, out + first);
  });
}

inline void run(const LayerNorm& op, const Run& step) {
  add_and_norm(op, step, [&](const Element* x, Element* out) { layer_norm(x, op, out); });
}

/// Without a weight `out` is the sum itself, of which a rank has all rows there only.
inline void run_norm_of_sum(const RmsNorm& op, const Run& step) {
  const RankSegment& ranks = step.ranks;
  const bool has_weight = has_values(op.weight);
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
    if (has_weight)
      rms_norm(sum, op.weight, op.size, op.eps, row_of(op.out));
    else
      std::memcpy(row_of(op.out), sum, op.size * sizeof(Element));
  });
  if (step.splits_rows) ranks.meet();
}

/// Both halves of 16 rotated pairs.
struct Pairs {
  Floats first, second;
};

inline Pairs rotate(Pairs x, const float* cos_sin, int64_t half, int64_t count) {
  const Floats cos = load(cos_sin, count), sin = load(cos_sin + half, count);
  return {fnma(x.second, sin, x.first * cos), fma(x.first, sin, x.second * cos)};
}

/// Rotate the first `rotary_dim` elements of a head, element 2 i with element 2 i + 1, in place.
inline void rotate_adjacent(const float* cos_sin, int64_t rotary_dim, Element* x) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t count = std::min<int64_t>(half - i, 16);
    Element first[16], second[16];
    for (int64_t n = 0; n < count; ++n) {
      first[n] = x[2 * (i + n)];
      second[n] = x[2 * (i + n) + 1];
    }
    const Pairs y = rotate({load(first, count), load(second, count)}, cos_sin + i, half, count);
    store(first, y.first, count);
    store(second, y.second, count);
    for (int64_t n = 0; n < count; ++n) {
      x[2 * (i + n)] = first[n];
      x[2 * (i + n) + 1] = second[n];
    }
  }
}

/// Rotate the first `rotary_dim` elements of a head, element i with element i + rotary_dim / 2, in place.
inline void rotate_halves(const float* cos_sin, int64_t rotary_dim, Element* x) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t count = half - i;
    const Pairs y = rotate({load(x + i, count), load(x + half + i, count)}, cos_sin + i, half, count);
    store(x + i, y.first, count);
    store(x + half + i, y.second, count);
  }
}

inline void rotate_head(bool adjacent_pairs, const float* cos_sin, int64_t rotary_dim, Element* head) {
  adjacent_pairs ? rotate_adjacent(cos_sin, rotary_dim, head) : rotate_halves(cos_sin, rotary_dim, head);
}

/// Write the keys or the values of a token, those of all heads, to their slot.
inline void write_heads(const Cache& cache, int64_t slot, const Element* heads, void* stored, float scale,
                        float* scales) {
  const int64_t size = cache.num_kv_heads * cache.head_dim, place = offset_in(cache, slot, 0);
  switch (cache.format) {
    case CacheFormat::ELEMENT:
      std::memcpy(static_cast<Element*>(stored) + place, heads, size * sizeof(Element));
      return;
    case CacheFormat::FP8:
      return quantize(heads, size, scale, static_cast<E4m3*>(stored) + place);
    case CacheFormat::INT8:
      return quantize_heads(heads, size, cache.head_dim, static_cast<int8_t*>(stored) + place,
                            scales + slot * cache.num_kv_heads);
  }
}

/// Normalise, if there is a norm, and rotate a token's heads in place, as `op` has it.
template <class Op>
inline void rotate_heads(const Op& op, const Run& step, int64_t token, const NormWeight& norm, int64_t head_dim,
                         int64_t num_heads, Element* heads) {
  const float* const cos_sin = op.cos_sin + step.batch.positions[token] * op.rotary_dim;
  for (int64_t i = 0; i < num_heads * head_dim; i += head_dim) {
    if (has_values(norm)) rms_norm(heads + i, norm, head_dim, op.norm_eps, heads + i);
    rotate_head(op.adjacent_pairs, cos_sin, op.rotary_dim, heads + i);
  }
}

inline void run(const Rope& op, const Run& step) {
  share(step.batch.num_tokens, [&](int64_t token) {
    rotate_heads(op, step, token, op.query_norm, op.head_dim, op.num_heads,
                 step.at(op.queries) + token * step.stride(op.queries));
  });
}

inline void run(const RopeAndKvWrite& op, const Run& step) {
  share(step.batch.num_tokens, [&](int64_t token) {
    const auto row_of = [&](const Value& value) { return step.at(value) + token * step.stride(value); };
    rotate_heads(op, step, token, op.query_norm, op.cache.head_dim, op.num_heads, row_of(op.queries));
    const int64_t slot = slot_of(step.batch, op.cache, token);
    if (slot < 0) return;
    Element* const keys = row_of(op.keys);
    rotate_heads(op, step, token, op.key_norm, op.cache.head_dim, op.cache.num_kv_heads, keys);
    write_heads(op.cache, slot, keys, op.cache.keys, op.cache.key_scale, op.cache.key_scales);
    write_heads(op.cache, slot, row_of(op.values), op.cache.values, op.cache.value_scale, op.cache.value_scales);
  });
}

inline void run(const RopeAndLatentWrite& op, const Run& step) {
  const int64_t size = op.cache.value_dim, rotary_dim = op.cache.head_dim - size;
  share(step.batch.num_tokens, [&](int64_t token) {
    const auto row_of = [&](const Value& value) { return step.at(value) + token * step.stride(value); };
    const float* cos_sin = op.cos_sin + step.batch.positions[token] * rotary_dim;
    for (int64_t head = 0; head < op.num_heads; ++head) {
      Element* const query = row_of(op.out) + head * op.out_stride;
      std::copy_n(row_of(op.queries) + head * op.query_stride, rotary_dim, query);
      rotate_head(op.adjacent_pairs, cos_sin, rotary_dim, query);
    }
    const int64_t slot = slot_of(step.batch, op.cache, token);
    if (slot < 0) return;
    Element* const latent = row_of(op.latent);
    rms_norm(latent, op.norm, size, op.norm_eps, latent);
    rotate_head(op.adjacent_pairs, cos_sin, rotary_dim, latent + size);
    write_heads(op.cache, slot, latent, op.cache.keys, op.cache.key_scale, op.cache.key_scales);
  });
}

}  // namespace inflight
