// Products with a panel of a matrix, in whichever format its weights are.
#pragma once

#include "integer_products.h"

namespace inflight {

/// Bytes of a panel's weights, without its scales.
inline int64_t panel_bytes(const Matrix& matrix) {
  if (matrix.inputs == InputFormat::INT8) return IntegerProduct::panel_bytes(matrix);
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

/// How many rows a thread may multiply with panels of a matrix, if there are many: the more, the less often codes are
/// decoded, and rows quantised. As floats they would not stay in the second cache.
inline int64_t most_rows(Instruction instruction, const Matrix& matrix) {
  if (matrix.inputs == InputFormat::INT8) return 8 * ROWS_AT_ONCE;
  if (matrix.format == WeightFormat::PLAIN) return ROWS_AT_ONCE;
  return Left::widens(instruction) ? 2 * ROWS_AT_ONCE : 8 * ROWS_AT_ONCE;
}

/// Rows that a thread multiplies with panels of a matrix as they are, 32 at a time. Codes that several passes read are
/// decoded once for all of them.
class MatrixProduct {
 public:
  /// x (num_rows, inputs of the matrix) has room for a multiple of 32 rows.
  MatrixProduct(Instruction instruction, const Element* x, int64_t stride, int64_t num_rows, const Matrix& matrix)
      : matrix_(matrix),
        left_(instruction, x, stride, num_rows, matrix.num_inputs,
              Left::widens(instruction) ? own_room<Left, float>(num_rows * matrix.num_inputs) : nullptr),
        sums_of_x_(matrix.zeros ? add_up(x, stride, num_rows) : nullptr) {}

  /// sums (rows, 32) = x @ panel of up to 32 rows from row `first` on; sums have room for 32. With each panel all rows
  /// are to follow each other, from 0 on.
  void multiply(int64_t panel, int64_t first, float* sums) const {
    const Left left = left_.rows(first);
    switch (matrix_.format) {
      case WeightFormat::PLAIN:
        return left.multiply<false>(reinterpret_cast<const Element*>(start_of(panel)), matrix_.num_inputs / PANEL, sums,
                                    PANEL);
      case WeightFormat::INT8:
        return multiply_codes<Int8>(left, panel, first, sums);
      case WeightFormat::FP8:
        return multiply_codes<Fp8>(left, panel, first, sums);
      case WeightFormat::INT4:
        return multiply_codes<Int4>(left, panel, first, sums);
      case WeightFormat::FP4:
        return multiply_codes<Fp4>(left, panel, first, sums);
      case WeightFormat::NF4:
        return multiply_codes<Nf4>(left, panel, first, sums);
    }
  }

 private:
  const char* start_of(int64_t panel) const {
    return static_cast<const char*>(matrix_.values) + panel * panel_bytes(matrix_);
  }

  template <class Code>
  void multiply_codes(const Left& left, int64_t panel, int64_t first, float* sums) const {
    if constexpr (std::is_same_v<Code, Int8> || std::is_same_v<Code, Int4>)
      if (matrix_.group_size < PANEL) return multiply_codes<Code, 2>(left, panel, first, sums);
    multiply_codes<Code, 1>(left, panel, first, sums);
  }

  template <class Code, int PARTS>
  void multiply_codes(const Left& left, int64_t panel, int64_t first, float* sums) const {
    using Lines = Coded<Code>;
    const float* const sums_of_x = sums_of_x_ ? sums_of_x_ + first * matrix_.num_groups : nullptr;
    // All rows follow each other with one panel.
    const Shared shared = share_floats(matrix_, panel, first != 0);
    if (left_.num_rows() <= MAX_OF_FEW_ROWS && left.instruction() != Instruction::AMX) {
      left.multiply_in_vectors<Lines>(start_of(panel), ScaledGroups<true, PARTS>{matrix_, shared, sums, sums_of_x});
      return;
    }
    const auto decoded =
        reinterpret_cast<const char*>(first == 0 ? decode<Lines>(panel) : own_room<Matrix, Element>(0));
    const ScaledGroups<false, PARTS> groups{matrix_, shared, sums, sums_of_x};
    if (left.instruction() == Instruction::AMX)
      multiply_groups(left, decoded, groups);
    else
      left.multiply_in_vectors<Plain<Element>>(decoded, groups);
  }

  /// Group by group, in tiles, which keep no scales.
  template <int PARTS>
  static void multiply_groups(const Left& left, const char* decoded, const ScaledGroups<false, PARTS>& groups) {
    const TilesOfParts<PARTS> tiles;
    alignas(64) float sums[ROWS_AT_ONCE * PANEL];
    for (int64_t group = 0; group < groups.count(); ++group) {
      const int64_t i = groups.begin(group);
      left.multiply<false>(reinterpret_cast<const Element*>(part_of<Plain<Element>, PARTS>(decoded, i)),
                           groups.end(group) - i, sums, PANEL, i * PANEL / PARTS);
      for (int64_t row = 0; row < left.num_rows(); ++row)
        for (int tile = 0; tile < 2; ++tile) {
          const Floats sum = load(sums + row * PANEL + 16 * tile);
          store(groups.at(row, tile), groups.added(group, row, tile, sum, load(groups.at(row, tile))));
        }
    }
  }

  template <class Lines>
  const Element* decode(int64_t panel) const {
    Element* const decoded = own_room<Matrix, Element>(panel_elements(matrix_.num_inputs));
    const char* step = start_of(panel);
    Element* line = decoded;
    for (int64_t i = 0; i < matrix_.num_inputs / PANEL; ++i, step += Lines::STEP_BYTES)
      for (int tile = 0; tile < 2; ++tile)
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r, line += LINE) {
          Lines::prefetch(step, tile, r, AHEAD_BYTES);
          store_line(line, Lines::even(step, tile, r), Lines::odd(step, tile, r));
        }
    return decoded;
  }

  /// (num_rows, groups): the sums of each row's elements.
  const float* add_up(const Element* x, int64_t stride, int64_t num_rows) const {
    float* const sums = own_room<MatrixProduct, float>(num_rows * matrix_.num_groups);
    for (int64_t row = 0; row < num_rows; ++row)
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
