// Groups: the steps of a panel whose products are added up by themselves, and what becomes of their sums.
#pragma once

#include "codes.h"
#include "operation_fields.h"

namespace inflight {

/// One group of all steps. sums = x @ panel, or sums += x @ panel; the stride in elements.
template <bool ADD>
struct OneGroup {
  static constexpr bool IN_ONE_PASS = false;
  int64_t num_steps;
  float* sums;
  int64_t stride;

  float* at(int64_t row, int tile) const { return sums + row * stride + 16 * tile; }
  int64_t count() const { return 1; }
  int64_t end(int64_t) const { return num_steps; }
  /// What a group's sums begin with.
  Floats start(int64_t row, int tile) const { return ADD ? load(at(row, tile)) : splat(0.0f); }
  void finish(int64_t, int64_t row, int tile, Floats sum) const { store(at(row, tile), sum); }
  /// The same for the rows from `row` on.
  OneGroup from(int64_t row) const { return {num_steps, at(row, 0), stride}; }
};

/// Sixteen scales, of whatever format they have.
inline Floats load_scales(ScaleFormat format, const void* scales, int64_t first) {
  switch (format) {
    case ScaleFormat::F16:
      return load(static_cast<const F16*>(scales) + first);
    case ScaleFormat::BF16:
      return load(static_cast<const Bf16*>(scales) + first);
    case ScaleFormat::F32:
      break;
  }
  return load(static_cast<const float*>(scales) + first);
}

/// The groups of a panel of codes: sums = the sum over groups of scale * (x - zero * sum of x) @ codes.
struct ScaledGroups {
  /// More rows multiply what is decoded for all of them (matrices.h).
  static constexpr bool IN_ONE_PASS = true;
  const Matrix& matrix;
  int64_t panel;
  float* sums;
  /// (rows, count()): of x in each group; null where the matrix has no zeros.
  const float* sums_of_x;

  float* at(int64_t row, int tile) const { return sums + row * PANEL + 16 * tile; }
  int64_t count() const { return matrix.num_groups; }
  int64_t end(int64_t group) const { return std::min((group + 1) * matrix.group_size, matrix.num_inputs) / PANEL; }
  Floats start(int64_t, int) const { return splat(0.0f); }
  void finish(int64_t group, int64_t row, int tile, Floats sum) const {
    const int64_t place = (panel * count() + group) * PANEL + 16 * tile;
    if (sums_of_x) sum = fnma(splat(sums_of_x[row * count() + group]), load_int8(matrix.zeros + place), sum);
    const Floats scales = load_scales(matrix.scale_format, matrix.scales, place);
    store(at(row, tile), group ? fma(sum, scales, load(at(row, tile))) : sum * scales);
  }
};

}  // namespace inflight
