// Rows of a matrix of codes that lies in panels: what an embedding looks up.
#pragma once

#include "groups.h"

namespace inflight {

template <class Code>
inline void read_row(const Matrix& matrix, int64_t row, int64_t size, Element* to) {
  using Lines = Coded<Code>;
  const int64_t panel = row / PANEL;
  const int tile = row % PANEL / 16, column = row % 16;
  const char* const steps =
      static_cast<const char*>(matrix.values) + panel * (matrix.num_inputs / PANEL) * Lines::STEP_BYTES;
  const auto shared = [=](SharedFormat format, const void* values, int64_t group) {
    float of_tile[16];
    store(of_tile, load_shared(format, values, (panel * matrix.num_groups + group) * PANEL + 16 * tile));
    return splat(of_tile[column]);
  };
  for (int64_t i = 0; i < size; i += 16) {
    const char* const step = steps + i / PANEL * Lines::STEP_BYTES;
    float some[16];
    for (int n = 0; n < 16; ++n) some[n] = Lines::number(step, tile, i % PANEL + n, column);
    Floats numbers = load(some);
    const int64_t group = i / matrix.group_size;
    if (matrix.zeros) numbers = numbers - shared(matrix.zero_format, matrix.zeros, group);
    store(to + i, numbers * shared(matrix.scale_format, matrix.scales, group), size - i);
  }
}

/// The first `size` inputs of a row, rounded once; inputs of the matrix are kept.
inline void read_row(const Matrix& matrix, int64_t row, int64_t size, Element* to) {
  switch (matrix.format) {
    case WeightFormat::INT8:
      return read_row<Int8>(matrix, row, size, to);
    case WeightFormat::FP8:
      return read_row<Fp8>(matrix, row, size, to);
    case WeightFormat::INT4:
      return read_row<Int4>(matrix, row, size, to);
    case WeightFormat::FP4:
      return read_row<Fp4>(matrix, row, size, to);
    case WeightFormat::NF4:
      return read_row<Nf4>(matrix, row, size, to);
    case WeightFormat::PLAIN:
      break;
  }
}

}  // namespace inflight
