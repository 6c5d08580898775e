// Products with a panel of a matrix, in whichever format its weights are.
#pragma once

#include <vector>

#include "products.h"

namespace inflight {

/// Room for floats that is this thread's own, kept for the next product. `Use` tells one room from another.
template <class Use>
inline float* own_floats(int64_t count) {
  thread_local std::vector<float> room;
  if (count > static_cast<int64_t>(room.size())) room.resize(count);
  return room.data();
}

/// Bytes of a panel's weights, without its scales.
inline int64_t panel_bytes(const Matrix& matrix) {
  const int64_t count = panel_elements(matrix.num_inputs);
  switch (matrix.format) {
    case WeightFormat::PLAIN:
      return count * sizeof(Element);
    case WeightFormat::INT8:
    case WeightFormat::FP8:
      return count;
    case WeightFormat::INT4:
    case WeightFormat::FP4:
    case WeightFormat::NF4:
      break;
  }
  return count / 2;
}

/// At most 32 rows that are multiplied with panels of a matrix.
class MatrixProduct {
 public:
  /// x (num_rows, inputs of the matrix) has room for 32 rows.
  MatrixProduct(Instruction instruction, const Element* x, int64_t stride, int64_t num_rows, const Matrix& matrix)
      : matrix_(matrix),
        left_(instruction, x, stride, num_rows, matrix.num_inputs,
              Left::widens(instruction) ? own_floats<Left>(num_rows * matrix.num_inputs) : nullptr),
        sums_of_x_(matrix.zeros ? add_up(x, stride) : nullptr) {}

  /// sums (num_rows, 32) = x @ panel; sums have room for 32 rows.
  void multiply(int64_t panel, float* sums) const {
    switch (matrix_.format) {
      case WeightFormat::PLAIN:
        return left_.multiply<false>(reinterpret_cast<const Element*>(start_of(panel)), matrix_.num_inputs / PANEL,
                                     sums, PANEL);
      case WeightFormat::INT8:
        return multiply_codes<Int8>(panel, sums);
      case WeightFormat::FP8:
        return multiply_codes<Fp8>(panel, sums);
      case WeightFormat::INT4:
        return multiply_codes<Int4>(panel, sums);
      case WeightFormat::FP4:
        return multiply_codes<Fp4>(panel, sums);
      case WeightFormat::NF4:
        return multiply_codes<Nf4>(panel, sums);
    }
  }

 private:
  const char* start_of(int64_t panel) const {
    return static_cast<const char*>(matrix_.values) + panel * panel_bytes(matrix_);
  }

  template <class Code>
  void multiply_codes(int64_t panel, float* sums) const {
    const ScaledGroups groups{matrix_, panel, sums, sums_of_x_};
    // What several passes read is decoded once for all of them.
    if (left_.instruction() == Instruction::AMX || left_.num_rows() > MAX_OF_FEW_ROWS)
      multiply_decoded<Coded<Code>>(start_of(panel), groups);
    else
      left_.multiply_in_vectors<Coded<Code>>(start_of(panel), groups);
  }

  template <class Lines>
  void multiply_decoded(const char* step, const ScaledGroups& groups) const {
    alignas(64) Element decoded[MAX_GROUP_SIZE * PANEL];
    alignas(64) float sums[ROWS_AT_ONCE * PANEL];
    for (int64_t group = 0, i = 0; group < groups.count(); ++group) {
      const int64_t first = i;
      Element* line = decoded;
      for (; i < groups.end(group); ++i, step += Lines::STEP_BYTES)
        for (int tile = 0; tile < 2; ++tile)
#pragma GCC unroll 16
          for (int r = 0; r < 16; ++r, line += LINE) {
            Lines::prefetch(step, tile, r, AHEAD_BYTES);
            store_line(line, Lines::even(step, tile, r), Lines::odd(step, tile, r));
          }
      left_.multiply<false>(decoded, i - first, sums, PANEL, PANEL * first);
      for (int64_t row = 0; row < left_.num_rows(); ++row)
        for (int tile = 0; tile < 2; ++tile) groups.finish(group, row, tile, load(sums + row * PANEL + 16 * tile));
    }
  }

  /// (num_rows, groups): the sums of each row's elements.
  const float* add_up(const Element* x, int64_t stride) const {
    float* const sums = own_floats<MatrixProduct>(left_.num_rows() * matrix_.num_groups);
    for (int64_t row = 0; row < left_.num_rows(); ++row)
      for (int64_t group = 0; group < matrix_.num_groups; ++group) {
        const int64_t first = group * matrix_.group_size;
        Floats total = splat(0.0f);
        for (int64_t i = first; i < std::min(first + matrix_.group_size, matrix_.num_inputs); i += 16)
          total = total + load(x + row * stride + i);
        sums[row * matrix_.num_groups + group] = sum(total);
      }
    return sums;
  }

  const Matrix& matrix_;
  Left left_;
  const float* sums_of_x_;
};

}  // namespace inflight
