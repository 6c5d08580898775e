// Products with a panel, by the instruction that is chosen for their number of rows.
#pragma once

#include "operation_fields.h"
#include "tiles.h"
#include "vector_products.h"

namespace inflight {

/// Whether the left matrix is multiplied as floats.
inline bool widens(Instruction instruction) {
  return instruction == Instruction::FMA || instruction == Instruction::FMA_AS_AMX;
}

constexpr int64_t ROWS_AT_ONCE = 32;

inline Instruction instruction_for(const Instructions& instructions, int64_t num_rows) {
  const auto& [one_row, few_rows, many_rows] = instructions;
  return num_rows == 1 ? one_row : num_rows <= ROWS_AT_ONCE ? few_rows : many_rows;
}

inline bool uses(const Instructions& instructions, Instruction one) {
  return instructions.one_row == one || instructions.few_rows == one || instructions.many_rows == one;
}

/// What a thread needs for products, while it multiplies.
struct Multiplier {
  FlushedDenormals flushed;
  Tiles tiles;

  explicit Multiplier(const Instructions& instructions) : tiles(uses(instructions, Instruction::AMX)) {}
};

/// At most 32 rows that are multiplied with panels by one instruction. For AMX there is room for 32 of them.
class Left {
 public:
  /// `size` elements of a row, a multiple of 32; `room` takes num_rows * size floats, if the instruction widens.
  Left(Instruction instruction, const Element* x, int64_t stride, int64_t num_rows, int64_t size, float* room)
      : instruction_(instruction), x_(x), stride_(stride), num_rows_(num_rows), size_(size), widened_(room) {
    if (!widens(instruction)) return;
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t i = 0; i < size; i += 16) _mm512_storeu_ps(room + row * size + i, load(x + row * stride + i));
  }

  /// sums (num_rows, 32) = x @ panel, or sums += x @ panel, over the first `num_steps` steps; sums have room for 32.
  template <bool ADD>
  void multiply(const Element* panel, int64_t num_steps, float* sums, int64_t sums_stride) const {
    switch (instruction_) {
      case Instruction::VDPBF16PS:
        return product_in_vectors<ADD>(x_, stride_, num_rows_, panel, num_steps, sums, sums_stride);
      case Instruction::FMA:
        return product_in_vectors<ADD>(widened_, size_, num_rows_, panel, num_steps, sums, sums_stride);
      case Instruction::AMX:
        return product_in_tiles<ADD>(x_, stride_, num_rows_, panel, num_steps, sums, sums_stride);
      case Instruction::FMA_AS_AMX:
        return product_as_in_tiles<ADD>(widened_, size_, num_rows_, panel, num_steps, sums, sums_stride);
    }
  }

 private:
  Instruction instruction_;
  const Element* x_;
  int64_t stride_, num_rows_, size_;
  const float* widened_;
};

}  // namespace inflight
