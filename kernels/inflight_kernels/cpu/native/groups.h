// Groups: the parts of a panel whose products are added up by themselves, and what becomes of their sums. A part is a
// step, or half of one: eight lines of each of its tiles.
#pragma once

#include "codes.h"
#include "operation_fields.h"
#include "room.h"

namespace inflight {

/// One group of all steps. sums = x @ panel, or sums += x @ panel; the stride in elements.
template <bool ADD>
struct OneGroup {
  static constexpr bool IN_ONE_PASS = false;
  /// Of a step.
  static constexpr int PARTS = 1;
  /// Rows that are multiplied at once.
  static constexpr int64_t MAX_ROWS = MAX_ROWS_IN_VECTORS;
  int64_t num_steps;
  float* sums;
  int64_t stride;

  float* at(int64_t row, int tile) const { return sums + row * stride + 16 * tile; }
  int64_t count() const { return 1; }
  /// Where its parts begin and end.
  int64_t begin(int64_t) const { return 0; }
  int64_t end(int64_t) const { return num_steps; }
  /// What a group's sums begin with.
  Floats start(int64_t row, int tile) const { return ADD ? load(at(row, tile)) : splat(0.0f); }
  /// What the sums of a group make of those of the groups before it.
  Floats added(int64_t, int64_t, int, Floats sum, Floats) const { return sum; }
  /// The same for the rows from `row` on.
  OneGroup from(int64_t row) const { return {num_steps, at(row, 0), stride}; }
};

/// Sixteen scales or zeros, of whatever format they have.
inline Floats load_shared(SharedFormat format, const void* shared, int64_t first) {
  switch (format) {
    case SharedFormat::F16:
      return load(static_cast<const F16*>(shared) + first);
    case SharedFormat::BF16:
      return load(static_cast<const Bf16*>(shared) + first);
    case SharedFormat::INT8:
      return load_int8(static_cast<const char*>(shared) + first);
    case SharedFormat::F32:
      break;
  }
  return load(static_cast<const float*>(shared) + first);
}

/// What the groups of a panel of codes share, as floats: (groups, 32) each.
struct Shared {
  const float *scales, *zeros;
};

/// Of a panel: in this thread's own room, if they are not floats. `is_last`: of the one that it was called with before.
inline Shared share_floats(const Matrix& matrix, int64_t panel, bool is_last) {
  const int64_t count = matrix.num_groups * PANEL, first = panel * count;
  float* const room = own_room<Shared, float>(2 * count);
  const auto floats = [&](SharedFormat format, const void* values, float* to) -> const float* {
    if (format == SharedFormat::F32) return static_cast<const float*>(values) + first;
    for (int64_t i = 0; i < count && !is_last; i += 16) store(to + i, load_shared(format, values, first + i));
    return to;
  };
  return {floats(matrix.scale_format, matrix.scales, room),
          matrix.zeros ? floats(matrix.zero_format, matrix.zeros, room + count) : nullptr};
}

/// The groups of a panel of codes: sums (rows, 32) = the sum over groups of scale * (x - zero * sum of x) @ codes.
/// `ONE_PASS`: all rows are multiplied at once. A group is some whole steps, or, of two parts in a step, one part.
template <bool ONE_PASS, int PARTS_OF_STEP>
struct ScaledGroups {
  static constexpr bool IN_ONE_PASS = ONE_PASS;
  static constexpr int PARTS = PARTS_OF_STEP;
  /// More would leave no registers for the totals: products of 512 rows and groups of 32 give 580 GFLOP/s with six at
  /// once and 630 with four (two cores of Zen 5, 2026-11-27).
  static constexpr int64_t MAX_ROWS = MAX_OF_FEW_ROWS;

  const Matrix& matrix;
  Shared shared;
  float* sums;
  /// (rows, count()): of x in each group; null where the matrix has no zeros.
  const float* sums_of_x;

  float* at(int64_t row, int tile) const { return sums + row * PANEL + 16 * tile; }
  int64_t count() const { return matrix.num_groups; }
  int64_t begin(int64_t group) const { return PARTS > 1 ? group : group * matrix.group_size / PANEL; }
  int64_t end(int64_t group) const {
    return PARTS > 1 ? group + 1 : std::min((group + 1) * matrix.group_size, matrix.num_inputs) / PANEL;
  }
  Floats start(int64_t, int) const { return splat(0.0f); }
  Floats added(int64_t group, int64_t row, int tile, Floats sum, Floats total) const {
    const int64_t place = group * PANEL + 16 * tile;
    if (sums_of_x) sum = fnma(splat(sums_of_x[row * count() + group]), load(shared.zeros + place), sum);
    const Floats scales = load(shared.scales + place);
    return group ? fma(sum, scales, total) : sum * scales;
  }
  /// The same for the rows from `row` on.
  ScaledGroups from(int64_t row) const {
    return {matrix, shared, at(row, 0), sums_of_x ? sums_of_x + row * count() : nullptr};
  }
};

}  // namespace inflight
