// Low-rank adapters: what each token's adapter adds to a linear layer.
#pragma once

#include "linear.h"

namespace inflight {

/// out[r] = row r of `a` times x, for `num_rows` rows; eight at a time, so that x is widened once for all of them.
inline void shrink(const Element* a, int64_t stride, int64_t num_rows, const Element* x, int64_t size, Element* out) {
  for (int64_t first = 0; first < num_rows; first += 8) {
    const Element* rows[8];
    Floats sums[8];
    for (int r = 0; r < 8; ++r) {
      rows[r] = a + std::min(first + r, num_rows - 1) * stride;
      sums[r] = splat(0.0f);
    }
    for (int64_t i = 0; i < size; i += 16) {
      const int64_t count = size - i;
      const Floats inputs = load(x + i, count);
      for (int r = 0; r < 8; ++r) sums[r] = fma(load(rows[r] + i, count), inputs, sums[r]);
    }
    for (int r = 0; r < 8 && first + r < num_rows; ++r) store(out + first + r, splat(sum(sums[r])), 1);
  }
}

/// out = scale * (z times the `rank` leading rows of `b`), `width` columns; thirty-two at a time.
inline void expand(const Element* b, int64_t stride, const Element* z, int64_t rank, float scale, int64_t width,
                   Element* out) {
  float* const factors = own_room<Lora, float>(rank);
  for (int64_t r = 0; r < rank; r += 16) store(factors + r, load(z + r, rank - r), rank - r);
  for (int64_t column = 0; column < width; column += 32) {
    const int64_t low_count = width - column, high_count = low_count - 16;
    Floats low = splat(0.0f), high = splat(0.0f);
    for (int64_t r = 0; r < rank; ++r) {
      const Element* row = b + r * stride + column;
      const Floats factor = splat(factors[r]);
      low = fma(load(row, low_count), factor, low);
      high = fma(load(row + 16, high_count), factor, high);
    }
    store(out + column, splat(scale) * low, low_count);
    store(out + column + 16, splat(scale) * high, high_count);
  }
}

/// Two meetings of the team: A x of all tokens, then B of that. An item is a token's part in one of the slices.
inline void run(const Lora& op, const Run& step) {
  const Batch& batch = step.batch;
  if (!batch.adapters) return;
  const int64_t num_items = batch.num_tokens * op.num_slices, num_outputs = op.widths[0] + op.widths[1] + op.widths[2];
  const auto narrow_of = [&](int64_t token, int64_t slice) {
    return step.at(op.narrow) + token * step.stride(op.narrow) + slice * op.max_rank;
  };
  share(num_items, [&](int64_t item) {
    const int64_t token = item / op.num_slices, slice = item % op.num_slices;
    if (!has_adapter(batch, token)) return;
    const int64_t slot = batch.adapters[token];
    const Element* a = op.a + (slot * op.num_slices + slice) * op.max_rank * op.num_inputs;
    const Element* x = step.at(op.x) + token * step.stride(op.x);
    shrink(a, op.num_inputs, op.ranks[slot], x, op.num_inputs, narrow_of(token, slice));
  });
  share(num_items, [&](int64_t item) {
    const int64_t token = item / op.num_slices, slice = item % op.num_slices;
    if (!has_adapter(batch, token)) return;
    const int64_t slot = batch.adapters[token];
    int64_t first = 0;
    for (int64_t before = 0; before < slice; ++before) first += op.widths[before];
    const Element* b = op.b + slot * op.max_rank * num_outputs + first;
    Element* delta = step.at(op.delta) + token * step.stride(op.delta) + first;
    expand(b, num_outputs, narrow_of(token, slice), op.ranks[slot], op.scales[slot], op.widths[slice], delta);
  });
}

}  // namespace inflight
