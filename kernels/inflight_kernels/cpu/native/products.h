// Products with a panel, by the instruction that is chosen for their number of rows.
#pragma once

#include "operation_fields.h"
#include "tiles.h"
#include "vector_products.h"

namespace inflight {

/// Rows of the left matrix that are multiplied at once.
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

/// Rows of floats.
struct Floating {
  const float* first;
  int64_t stride;
};

/// Rows as floats: widened into `room`, if they are not floats.
template <class Format>
inline Floating as_floats(const Format* x, int64_t stride, int64_t num_rows, int64_t size, float* room) {
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t i = 0; i < size; i += 16) store(room + row * size + i, load(x + row * stride + i));
  return {room, size};
}
inline Floating as_floats(const float* x, int64_t stride, int64_t, int64_t, float*) { return {x, stride}; }

/// Products of bfloat16 as they are, in libraries for processors that have instructions for them.
#ifdef __AVX512BF16__
template <bool ADD>
inline void multiply_pairs(Instruction instruction, const Bf16* x, int64_t stride, int64_t num_rows, const Bf16* panel,
                           int64_t num_steps, float* sums, int64_t sums_stride) {
#ifdef __AMX_BF16__
  if (instruction == Instruction::AMX)
    return product_in_tiles<ADD>(x, stride, num_rows, panel, num_steps, sums, sums_stride);
#endif
  if (instruction == Instruction::VDPBF16PS)
    return product_in_vectors<Dotted, ADD>(x, stride, num_rows, panel, num_steps, sums, sums_stride);
}
#endif
template <bool ADD, class Format>
inline void multiply_pairs(Instruction, const Format*, int64_t, int64_t, const Format*, int64_t, float*, int64_t) {}

/// At most 32 rows that are multiplied with panels by one instruction. For AMX there is room for 32 of them.
class Left {
 public:
  /// Whether they are multiplied as floats.
  static bool widens(Instruction instruction) {
    return instruction == Instruction::FMA || instruction == Instruction::FMA_AS_AMX;
  }

  /// `size` elements of a row, a multiple of 32; `room` takes num_rows * size floats, if they are widened.
  Left(Instruction instruction, const Element* x, int64_t stride, int64_t num_rows, int64_t size, float* room)
      : instruction_(instruction), x_(x), stride_(stride), num_rows_(num_rows), floats_{nullptr, 0} {
    if (widens(instruction)) floats_ = as_floats(x, stride, num_rows, size, room);
  }

  /// sums (num_rows, 32) = x @ panel, or sums += x @ panel, over the first `num_steps` steps; sums have room for 32.
  template <bool ADD>
  void multiply(const Element* panel, int64_t num_steps, float* sums, int64_t sums_stride) const {
    switch (instruction_) {
      case Instruction::FMA:
        return product_in_vectors<Fused<Element>, ADD>(floats_.first, floats_.stride, num_rows_, panel, num_steps, sums,
                                                       sums_stride);
      case Instruction::FMA_AS_AMX:
        return product_as_in_tiles<ADD>(floats_.first, floats_.stride, num_rows_, panel, num_steps, sums, sums_stride);
      case Instruction::VDPBF16PS:
      case Instruction::AMX:
        return multiply_pairs<ADD>(instruction_, x_, stride_, num_rows_, panel, num_steps, sums, sums_stride);
    }
  }

 private:
  Instruction instruction_;
  const Element* x_;
  int64_t stride_, num_rows_;
  Floating floats_;
};

}  // namespace inflight
