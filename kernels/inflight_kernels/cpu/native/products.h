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

/// What a thread needs for products, while it multiplies.
struct Multiplier {
  FlushedDenormals flushed;
  Tiles tiles;
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
template <class Lines, class Groups>
inline void multiply_pairs(const Bf16* x, int64_t stride, int64_t num_rows, const char* panel, const Groups& groups) {
  product_in_vectors<Dotted<Lines>>(x, stride, num_rows, panel, groups);
}
#endif
template <class Lines, class Groups, class Format>
inline void multiply_pairs(const Format*, int64_t, int64_t, const char*, const Groups&) {}

#ifdef __AMX_BF16__
template <bool ADD>
inline void multiply_tiles(const Bf16* x, int64_t stride, int64_t num_rows, const Bf16* panel,
                           const OneGroup<ADD>& group) {
  product_in_tiles<ADD>(x, stride, num_rows, panel, group.num_steps, group.sums, group.stride);
}
#endif
template <bool ADD, class Format>
inline void multiply_tiles(const Format*, int64_t, int64_t, const Format*, const OneGroup<ADD>&) {}

/// Rows that are multiplied with panels by one instruction, at most 32 at once. For AMX there is room for 32 of them.
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

  /// sums (num_rows, 32) = x @ panel, or sums += x @ panel, over the first `num_steps` steps, which begin with the
  /// rows' element `first`; sums have room for 32.
  template <bool ADD>
  void multiply(const Element* panel, int64_t num_steps, float* sums, int64_t sums_stride, int64_t first = 0) const {
    const OneGroup<ADD> group{num_steps, sums, sums_stride};
    if (instruction_ == Instruction::AMX) return multiply_tiles(x_ + first, stride_, num_rows_, panel, group);
    multiply_in_vectors<Plain<Element>>(reinterpret_cast<const char*>(panel), group, first);
  }

  /// The same of a panel whose lines are read in another way, as `groups` puts them together; not by AMX.
  template <class Lines, class Groups>
  void multiply_in_vectors(const char* panel, const Groups& groups, int64_t first = 0) const {
    switch (instruction_) {
      case Instruction::FMA:
        return product_in_vectors<Fused<Lines>>(floats_.first + first, floats_.stride, num_rows_, panel, groups);
      case Instruction::FMA_AS_AMX:
        return product_as_in_tiles<Lines>(floats_.first + first, floats_.stride, num_rows_, panel, groups);
      case Instruction::VDPBF16PS:
        return multiply_pairs<Lines>(x_ + first, stride_, num_rows_, panel, groups);
      case Instruction::AMX:
        return;
    }
  }

  /// Up to 32 of them, from `first` on.
  Left rows(int64_t first) const {
    Left some = *this;
    some.x_ += first * stride_;
    if (floats_.first) some.floats_.first += first * floats_.stride;
    some.num_rows_ = std::min(num_rows_ - first, ROWS_AT_ONCE);
    return some;
  }

  Instruction instruction() const { return instruction_; }
  int64_t num_rows() const { return num_rows_; }

 private:
  Instruction instruction_;
  const Element* x_;
  int64_t stride_, num_rows_;
  Floating floats_;
};

}  // namespace inflight
