// Attention of up to 32 queries to the keys of one head, in products with panels: what decoding rows and prompt chunks
// share.
//
// A query's sums have one order, whatever is computed beside it. The keys of a sequence are divided into parts of 512,
// at positions that are the same for all queries. In a part a query passes over 128 keys at a time, with a running
// maximum and sum of weights (online softmax), and the parts are merged from the first to the last. So a token has the
// same bits in a decode, in a chunk with any borders, and where it is computed again.
#pragma once

#include "linear.h"

namespace inflight {

constexpr int64_t QUERIES_AT_ONCE = 32, KEYS_AT_ONCE = 128, KEYS_OF_PART = 512, MAX_HEAD_DIM = 576;

/// The score of a key that a query does not see. Finite: two of them may be subtracted. A maximum below the other one
/// is that of a query which has not seen a key yet.
constexpr float MASKED = -1e30f, NOTHING_SEEN = -1e20f;

/// Queries that share a key head: tokens of a chunk, or the heads of one token.
struct Queries {
  const Element* first;
  int64_t stride, count;
  /// Positions of the keys that the first one sees; those of each other one begin and end `advance` later than those of
  /// the one before it.
  int64_t begin, end, advance;
  /// Where the keys end that there are, if `end` may be behind that.
  int64_t limit = INT64_MAX;
  /// What is added to the first one's scores, from the key at position 0 on; each other one's begin one element before
  /// those of the one before it. Null = nothing.
  const float* bias = nullptr;

  int64_t end_of(int64_t row) const { return std::min(end + row * advance, limit); }
  int64_t end_of_last() const { return end_of(count - 1); }
};

/// The first of the keys that a query sees which sees keys up to `end`.
inline int64_t first_key(const Attention& op, int64_t end) { return std::max<int64_t>(begin_of(op, end), 0); }

/// Keys and values from one position on, as panels.
struct Panels {
  const Element *keys, *values;
  /// Elements of a panel of values, which holds 32 elements of every value.
  int64_t values_stride;
};

/// Offsets of a head's keys and values at consecutive positions of a sequence, without a division for each.
class Offsets {
 public:
  Offsets(const Cache& cache, const int32_t* blocks, int64_t kv_head, int64_t position)
      : cache_(cache), block_(blocks + position / cache.block_size), kv_head_(kv_head) {
    place_ = position % cache.block_size;
  }
  /// That of the position, and on to the next one.
  int64_t next() {
    const int64_t offset = offset_in(cache_, *block_ * cache_.block_size + place_, kv_head_);
    if (++place_ == cache_.block_size) {
      place_ = 0;
      ++block_;
    }
    return offset;
  }

 private:
  const Cache& cache_;
  const int32_t* block_;
  int64_t kv_head_, place_;
};

/// 32 elements of each of 32 rows, null where there is none.
using Rows = const Element* const (&)[PANEL];

/// Room for such rows, of a cache that holds something else; `scales` has one for each row, of whole numbers.
struct Widened {
  const Element* rows[PANEL];
  alignas(64) Element elements[PANEL][PANEL];
};

inline void widen(const E4m3* from, float, Element* to) { widen(from, to); }
inline void widen(const int8_t* from, float scale, Element* to) {
  for (int i = 0; i < PANEL; i += 16) store(to + i, load_int8(reinterpret_cast<const char*>(from) + i) * splat(scale));
}

inline Rows elements_of(Rows rows, const float*, Widened&) { return rows; }
template <class Stored>
inline Rows elements_of(const Stored* const (&rows)[PANEL], const float* scales, Widened& room) {
  for (int n = 0; n < PANEL; ++n) {
    room.rows[n] = rows[n] ? room.elements[n] : nullptr;
    if (rows[n]) widen(rows[n], scales[n], room.elements[n]);
  }
  return room.rows;
}

/// See pack_keys_and_values. `Stored`: what the cache holds.
template <class Stored>
inline void pack_stored(const Attention& op, const int32_t* blocks, int64_t kv_head, int64_t start, int64_t end,
                        Element* key_panel, Element* value_panel, int64_t values_stride) {
  const auto stored = [](const void* cache) { return static_cast<const Stored*>(cache); };
  const Stored *keys[PANEL], *values[PANEL];
  float key_scales[PANEL], value_scales[PANEL];
  Offsets offsets(op.cache, blocks, kv_head, start);
  const int64_t count = std::min(end - start, PANEL), num_next = std::min(end - start - count, PANEL);
  for (int64_t i = 0; i < PANEL; ++i) {
    const int64_t offset = i < count ? offsets.next() : 0;
    keys[i] = i < count ? stored(op.cache.keys) + offset : nullptr;
    values[i] = i < count ? stored(op.cache.values) + offset : nullptr;
    if constexpr (std::is_same_v<Stored, int8_t>) {
      key_scales[i] = op.cache.key_scales[offset / op.cache.head_dim];
      value_scales[i] = op.cache.value_scales[offset / op.cache.head_dim];
    }
  }
  // Mostly the next call wants the next positions, which the processor does not find by itself.
  const int lines = ceil_div(op.cache.head_dim * sizeof(Stored), 64);
  for (int64_t i = 0; i < num_next; ++i) {
    const int64_t offset = offsets.next();
    prefetch_lines(reinterpret_cast<const char*>(stored(op.cache.keys) + offset), lines);
    if (op.cache.values != op.cache.keys)
      prefetch_lines(reinterpret_cast<const char*>(stored(op.cache.values) + offset), lines);
  }
  Widened room;
  for (int64_t i = 0; i < op.cache.head_dim; i += PANEL) {
    pack_rows(elements_of(keys, key_scales, room), key_panel + panel_elements(i));
    if (i < op.cache.value_dim)
      pack_columns(elements_of(values, value_scales, room), value_panel + values_stride * i / PANEL);
    for (int64_t n = 0; n < count; ++n) {
      keys[n] += PANEL;
      values[n] += PANEL;
    }
  }
}

/// Lay out the keys and values of one head at 32 positions from `start` on as panels; zeros from `end` on.
inline void pack_keys_and_values(const Attention& op, const int32_t* blocks, int64_t kv_head, int64_t start,
                                 int64_t end, Element* key_panel, Element* value_panel, int64_t values_stride) {
  const auto pack = [&] {
    switch (op.cache.format) {
      case CacheFormat::ELEMENT:
        break;
      case CacheFormat::FP8:
        return pack_stored<E4m3>;
      case CacheFormat::INT8:
        return pack_stored<int8_t>;
    }
    return pack_stored<Element>;
  }();
  pack(op, blocks, kv_head, start, end, key_panel, value_panel, values_stride);
}

/// Add to one query's weighted values, largest score and sum of weights those of a later part.
inline void merge(const float* part, float part_maximum, float part_total, int64_t value_dim, float* sums,
                  float& maximum, float& total) {
  const float now = std::max(maximum, part_maximum);
  const Floats kept = exp2(splat(maximum - now)), added = exp2(splat(part_maximum - now));
  maximum = now;
  total = first_of(fma(splat(part_total), added, splat(total) * kept));
  for (int64_t i = 0; i < value_dim; i += 16) store(sums + i, fma(load(part + i), added, load(sums + i) * kept));
}

/// The output of one query of `head`: what was gathered of all its keys, and the head's sink, which has a weight and no
/// value.
inline void finish(const Attention& op, int64_t head, const float* sums, float maximum, float total, Element* out) {
  Floats weights = splat(total);
  if (op.sinks) weights = weights + exp2(min(splat(127.0f), fms(splat(op.sinks[head]), splat(LOG2_E), splat(maximum))));
  for (int64_t i = 0; i < op.cache.value_dim; i += 16)
    store(out + i, load(sums + i) / weights * splat(op.cache.value_scale));
}

/// What queries have gathered of a part, or of all parts so far: weighted values, and the largest score and sum of
/// weights of each. Products write 16 rows, however many queries there are.
struct Gathered {
  alignas(64) float sums[QUERIES_AT_ONCE * MAX_HEAD_DIM];
  alignas(64) float maxima[QUERIES_AT_ONCE], totals[QUERIES_AT_ONCE];

  void clear(int64_t count, int64_t value_dim) {
    std::fill(sums, sums + round_up(count, 16) * value_dim, 0.0f);
    std::fill(maxima, maxima + QUERIES_AT_ONCE, MASKED);
    std::fill(totals, totals + QUERIES_AT_ONCE, 0.0f);
  }
  void add(const Gathered& part, int64_t count, int64_t value_dim) {
    for (int64_t row = 0; row < count; ++row)
      merge(part.sums + row * value_dim, part.maxima[row], part.totals[row], value_dim, sums + row * value_dim,
            maxima[row], totals[row]);
  }
};

/// Hide the keys that a query does not see; scores are those of keys from `key` on.
inline void hide(const Queries& queries, int64_t key, float* scores) {
  for (int64_t row = 0; row < queries.count; ++row) {
    const int64_t first = queries.begin + row * queries.advance - key, end = queries.end_of(row) - key;
    for (int64_t i = 0; i < KEYS_AT_ONCE; i += 16) {
      float* some = scores + row * KEYS_AT_ONCE + i;
      store(some, keep_lanes(load(some), first - i, end - i, splat(MASKED)));
    }
  }
}

/// What multiplies scores where they are weighed, so that they are exponents of 2; capped ones are a tanh by then.
inline float scale_of_scores(const Attention& op) {
  return (op.soft_cap ? op.soft_cap : op.scale * op.cache.key_scale) * LOG2_E;
}

/// Replace scores of `num_keys` keys by the tanh that caps them.
inline void cap(const Attention& op, int64_t count, int64_t num_keys, float* scores) {
  const Floats factor = splat(op.scale * op.cache.key_scale / op.soft_cap);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = row * KEYS_AT_ONCE; i < row * KEYS_AT_ONCE + num_keys; i += 16)
      store(scores + i, tanh(load(scores + i) * factor));
}

/// Add what scores of `num_keys` keys from `key` on have of their distances, in the unit of products.
inline void add_bias(const Attention& op, const Queries& queries, int64_t key, int64_t num_keys, float* scores) {
  const Floats factor = splat(1.0f / op.scale);
  for (int64_t row = 0; row < queries.count; ++row)
    for (int64_t i = 0; i < num_keys; i += 16) {
      float* some = scores + row * KEYS_AT_ONCE + i;
      const int64_t count = std::max<int64_t>(queries.limit - key - i, 0);
      store(some, fma(load(queries.bias + key + i - row, count), factor, load(some)));
    }
}

/// One step of the online softmax: replaces the scores of up to 16 queries by weights, 2 ** (score * scale - maximum),
/// and scales what was gathered so far to the new maxima.
inline void soften(const float* scores, int64_t count, float scale, int64_t value_dim, float* sums, float* maxima,
                   float* totals, Element* weights) {
  alignas(64) float highest[16], kept[16], shifts[16];
  for (int64_t row = 0; row < 16; ++row) {
    if (row >= count) {
      highest[row] = MASKED;
      continue;
    }
    Floats x = load(scores + row * KEYS_AT_ONCE);
    for (int i = 16; i < KEYS_AT_ONCE; i += 16) x = max(x, load(scores + row * KEYS_AT_ONCE + i));
    highest[row] = largest(x);
  }
  const Floats before = load(maxima);
  const Floats now = max(before, load(highest) * splat(scale));
  const Floats factors = exp2(before - now);
  store(maxima, now);
  store(kept, factors);
  // Hidden keys get no weight even where a query has seen none yet.
  store(shifts, replace_below(now, splat(NOTHING_SEEN), splat(0.0f)));
  if (differ(before, now))
    for (int64_t row = 0; row < count; ++row)
      for (int64_t i = row * value_dim; i < (row + 1) * value_dim; i += 16)
        store(sums + i, load(sums + i) * splat(kept[row]));

  Floats added[16];
  for (int64_t row = 0; row < 16; ++row) {
    added[row] = splat(0.0f);
    if (row >= count) continue;
    const Floats shift = splat(shifts[row]);
    for (int64_t i = row * KEYS_AT_ONCE; i < (row + 1) * KEYS_AT_ONCE; i += 32) {
      const Floats low = exp2(fms(load(scores + i), splat(scale), shift));
      const Floats high = exp2(fms(load(scores + i + 16), splat(scale), shift));
      added[row] = added[row] + (low + high);
      store(weights + i, low);
      store(weights + i + 16, high);
    }
  }
  store(totals, fma(load(totals), factors, sums_of(added)));
}

/// Queries on their way over the keys.
class Attending {
 public:
  Attending(const Attention& op, const Run& step, const Queries& queries)
      : op_(op),
        queries_(queries),
        instruction_(instruction_for(step.instructions(), queries.count)),
        left_(instruction_, queries.first, queries.stride, queries.count, op.cache.head_dim, wide_queries_) {}

  /// Gather the keys of the part that begins at `part`. `find(key)` gives the panels of the keys from `key` on.
  template <class Find>
  void gather_part(int64_t part, Find find, Gathered& gathered) {
    const int64_t head_dim = op_.cache.head_dim, value_dim = op_.cache.value_dim, count = queries_.count;
    const int64_t first = std::max(part, queries_.begin / KEYS_AT_ONCE * KEYS_AT_ONCE);
    const int64_t end = std::min(part + KEYS_OF_PART, queries_.end_of_last());
    gathered.clear(count, value_dim);
    for (int64_t key = first; key < end; key += KEYS_AT_ONCE) {
      const Panels panels = find(key);
      const int64_t num_keys = std::min(round_up(end - key, PANEL), KEYS_AT_ONCE);
      for (int64_t i = 0; i < num_keys; i += PANEL)
        left_.template multiply<false>(panels.keys + i * head_dim, head_dim / PANEL, scores_ + i, KEYS_AT_ONCE);
      if (op_.soft_cap) cap(op_, count, num_keys, scores_);
      if (queries_.bias) add_bias(op_, queries_, key, num_keys, scores_);
      const bool all_seen = key + KEYS_AT_ONCE <= queries_.end_of(0) && key >= last_begin();
      if (!all_seen) hide(queries_, key, scores_);
      for (int64_t row = 0; row < count; row += 16)
        soften(scores_ + row * KEYS_AT_ONCE, std::min<int64_t>(count - row, 16), scale_of_scores(op_), value_dim,
               gathered.sums + row * value_dim, gathered.maxima + row, gathered.totals + row,
               weights_ + row * KEYS_AT_ONCE);
      const Left weighing(instruction_, weights_, KEYS_AT_ONCE, count, KEYS_AT_ONCE, wide_weights_);
      for (int64_t i = 0; i < value_dim; i += PANEL)
        weighing.template multiply<true>(panels.values + panels.values_stride * i / PANEL, num_keys / PANEL,
                                         gathered.sums + i, value_dim);
    }
  }

 private:
  int64_t last_begin() const { return queries_.begin + (queries_.count - 1) * queries_.advance; }

  const Attention& op_;
  const Queries& queries_;
  alignas(64) float scores_[QUERIES_AT_ONCE * KEYS_AT_ONCE];
  alignas(64) Element weights_[QUERIES_AT_ONCE * KEYS_AT_ONCE];
  alignas(64) float wide_queries_[QUERIES_AT_ONCE * MAX_HEAD_DIM], wide_weights_[QUERIES_AT_ONCE * KEYS_AT_ONCE];
  Instruction instruction_;
  Left left_;
};

}  // namespace inflight
