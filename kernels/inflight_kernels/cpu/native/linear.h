// x @ weight.T + bias over packed weights, by all threads of a team.
#pragma once

#include <omp.h>

#include "activations.h"
#include "operations.h"

namespace inflight {

/// Of 72, 300, 600 and 1000 KiB, 300 and this made products of 1,024 rows fastest (2 MiB of second cache).
constexpr int64_t GROUP_BYTES = 600 * 1024;

/// Until all threads of the team have come here.
inline void wait_for_all() {
#pragma omp barrier
}

/// Each thread of the team calls it, does some of the items, and leaves when none is left. Threads take runs of items,
/// about eight each: to take every item by itself would cost more than a norm of a row.
template <class Item>
inline void share_and_go_on(int64_t num_items, Item item) {
  const int64_t run = std::max<int64_t>(num_items / (8 * omp_get_num_threads()), 1);
#pragma omp for schedule(dynamic, run) nowait
  for (int64_t i = 0; i < num_items; ++i) item(i);
}

/// The same, but threads leave when all items are done.
template <class Item>
inline void share(int64_t num_items, Item item) {
  share_and_go_on(num_items, item);
  wait_for_all();
}

/// Lay out the rows of `weight` (num_outputs, num_inputs) as panels: panel p has the rows `row_of(p, 0..31)`, no row
/// where that is negative. `num_inputs` is a multiple of 32.
template <class RowOf>
inline void pack_weight(const Element* weight, int64_t num_inputs, int64_t num_panels, RowOf row_of, Element* packed) {
  share(num_panels, [&](int64_t panel) {
    const Element* rows[PANEL];
    for (int64_t i = 0; i < num_inputs; i += PANEL) {
      for (int n = 0; n < PANEL; ++n) {
        const int64_t row = row_of(panel, n);
        rows[n] = row < 0 ? nullptr : weight + row * num_inputs + i;
      }
      pack_rows(rows, packed + panel_elements(panel * num_inputs + i));
    }
  });
}

/// Panels of a matrix that stay in the second cache while all rows pass over them.
inline int64_t panels_of_group(const Matrix& matrix) { return std::max<int64_t>(GROUP_BYTES / panel_bytes(matrix), 1); }

/// Calls `finish(row, panel, sums)` with the 32 sums of each of a product's rows and each panel from `first` to `end`.
template <class Product, class Finish>
inline void multiply_panels(const Product& product, int64_t num_rows, int64_t first, int64_t end, Finish finish) {
  const int64_t num_tiles = ceil_div(num_rows, ROWS_AT_ONCE), count = (end - first) * num_tiles;
  // Sums are finished after the next ones' product: read at once, they would have to leave AMX's tiles first.
  alignas(64) float sums[2][ROWS_AT_ONCE * PANEL];
  for (int64_t i = 0; i <= count; ++i) {
    if (i < count) product.multiply(first + i / num_tiles, i % num_tiles * ROWS_AT_ONCE, sums[i % 2]);
    if (i == 0) continue;
    const int64_t start = (i - 1) % num_tiles * ROWS_AT_ONCE, panel = first + (i - 1) / num_tiles;
    for (int64_t row = start; row < std::min(start + ROWS_AT_ONCE, num_rows); ++row)
      finish(row, panel, sums[(i - 1) % 2] + (row - start) * PANEL);
  }
}

/// More rows are quantised once for all threads, which then have to wait for each other.
constexpr int64_t MAX_ROWS_OF_OWN = 4;

/// What products multiply with the panels of a matrix: rows of elements, with room for a multiple of 32 of them, and
/// the same quantised, if that is what the matrix takes and they are many.
class Operand {
 public:
  /// Each thread of the team calls it. `room`: as `room_bytes` says.
  Operand(const Element* x, int64_t stride, int64_t num_rows, const Matrix& matrix, char* room)
      : x_(x), stride_(stride), integers_{} {
    if (matrix.inputs == InputFormat::KEPT || num_rows <= MAX_ROWS_OF_OWN || !room) return;
    Pieces pieces{room};
    integers_ = IntegerRows::take(num_rows, matrix, pieces);
    share(num_rows, [&](int64_t row) { quantize_row(x + row * stride, matrix, integers_, row); });
  }

  static int64_t room_bytes(int64_t num_rows, const Matrix& matrix) {
    Pieces pieces{nullptr};
    if (matrix.inputs != InputFormat::KEPT) IntegerRows::take(num_rows, matrix, pieces);
    return pieces.num_bytes;
  }

  /// Calls `finish(row, panel, sums)` with the 32 sums of each of the rows from `start` on and each panel from `first`
  /// to `end`; rows are counted from `start`.
  template <class Finish>
  void multiply_block(Instruction instruction, int64_t start, int64_t num_rows, const Matrix& matrix, int64_t first,
                      int64_t end, Finish finish) const {
    const Element* const x = x_ + start * stride_;
    if (matrix.inputs == InputFormat::KEPT)
      return multiply_panels(MatrixProduct(instruction, x, stride_, num_rows, matrix), num_rows, first, end, finish);
    const IntegerRows rows =
        integers_.values ? integers_.some(start, num_rows) : quantize_rows(x, stride_, num_rows, matrix);
    multiply_panels(IntegerProduct(rows, matrix), num_rows, first, end, finish);
  }

 private:
  const Element* x_;
  int64_t stride_;
  IntegerRows integers_;
};

/// Calls `finish(row, panel, sums)` with the 32 sums of each row and panel. x and `room`: see Operand.
template <class Finish>
inline void multiply(const Instructions& instructions, const Element* x, int64_t stride, int64_t num_rows,
                     const Matrix& matrix, int64_t num_panels, char* room, Finish finish) {
  const Operand operand(x, stride, num_rows, matrix, room);
  const Instruction instruction = instruction_for(instructions, num_rows);
  const int64_t block = most_rows(instruction, matrix), num_blocks = ceil_div(num_rows, block);
  // Few rows wait for memory, which gives most to threads that read on and on: a group for each. With more rows a group
  // is what stays in the second cache while all rows pass over it.
  const int64_t group = num_rows <= ROWS_AT_ONCE ? ceil_div(num_panels, omp_get_num_threads())
                                                 : std::min(panels_of_group(matrix), num_panels);
  share(ceil_div(num_panels, group) * num_blocks, [&](int64_t item) {
    const int64_t first = item / num_blocks * group, end = std::min(first + group, num_panels);
    const int64_t start = item % num_blocks * block, count = std::min(block, num_rows - start);
    operand.multiply_block(instruction, start, count, matrix, first, end,
                           [&](int64_t row, int64_t panel, const float* sums) { finish(start + row, panel, sums); });
  });
}

/// out (num_rows, num_outputs) = x @ weight.T + bias, rounded once. Strides are elements between two rows.
/// `adapt(row, column, count, y)` gives what is stored in the place of `count` of them, sixteen at most.
template <class Adapt>
inline void linear(const Instructions& instructions, const Element* x, int64_t stride, int64_t num_rows,
                   const Matrix& weight, const Element* bias, int64_t num_outputs, Element* out, int64_t out_stride,
                   char* room, Adapt adapt) {
  multiply(instructions, x, stride, num_rows, weight, ceil_div(num_outputs, PANEL), room,
           [&](int64_t row, int64_t panel, const float* sums) {
             for (int64_t tile = 0; tile < 2; ++tile) {
               const int64_t column = panel * PANEL + 16 * tile;
               const int64_t count = num_outputs - column;
               Floats y = load(sums + 16 * tile);
               if (bias) y = y + load(bias + column, count);
               store(out + row * out_stride + column, adapt(row, column, count, y), count);
             }
           });
}

/// What adapters add to the outputs of a linear layer.
struct Deltas {
  const Element* first;
  int64_t stride;
  const Batch& batch;

  Deltas(const Value& delta, const Run& step) : first(nullptr), stride(0), batch(step.batch) {
    if (delta.buffer < 0 || !batch.adapters) return;
    first = step.at(delta);
    stride = step.stride(delta);
  }
  bool has(int64_t row) const { return first && has_adapter(batch, row); }
  /// y, rounded, plus the delta of `count` outputs, sixteen at most.
  Floats add(int64_t row, int64_t column, int64_t count, Floats y) const {
    return rounded(y) + load(first + row * stride + column, count);
  }
};

inline void run(const Linear& op, const Run& step) {
  const Deltas deltas(op.delta, step);
  linear(step.instructions(), step.at(op.x), step.stride(op.x), step.batch.num_tokens, op.weight, op.bias,
         op.num_outputs, step.at(op.out), step.stride(op.out), step.integers,
         [&](int64_t row, int64_t column, int64_t count, Floats y) {
           return deltas.has(row) ? deltas.add(row, column, count, y) : y;
         });
}

inline void run(const HeadLinear& op, const Run& step) {
  const int64_t num_rows = step.batch.num_tokens, num_panels = ceil_div(op.num_outputs, PANEL);
  const int64_t stride = step.stride(op.x), out_stride = step.stride(op.out);
  const Instruction instruction = instruction_for(step.instructions(), num_rows);
  const int64_t block = most_rows(instruction, op.weight), num_blocks = ceil_div(num_rows, block);
  // See multiply.
  const int64_t of_thread = ceil_div(op.num_heads * num_panels, omp_get_num_threads());
  const int64_t group = std::min(num_rows <= ROWS_AT_ONCE ? of_thread : panels_of_group(op.weight), num_panels);
  const int64_t num_groups = ceil_div(num_panels, group);
  share(op.num_heads * num_groups * num_blocks, [&](int64_t item) {
    const int64_t start = item % num_blocks * block, count = std::min(block, num_rows - start);
    const int64_t first = item / num_blocks % num_groups * group, head = item / num_blocks / num_groups;
    const int64_t begin = head * num_panels, end = begin + std::min(first + group, num_panels);
    const Element* const x = step.at(op.x) + start * stride + head * op.x_stride;
    Element* const out = step.at(op.out) + start * out_stride + head * op.out_stride;
    const MatrixProduct product(instruction, x, stride, count, op.weight);
    multiply_panels(product, count, begin + first, end, [&](int64_t row, int64_t panel, const float* sums) {
      for (int64_t tile = 0; tile < 2; ++tile) {
        const int64_t column = (panel - begin) * PANEL + 16 * tile;
        store(out + row * out_stride + column, load(sums + 16 * tile), op.num_outputs - column);
      }
    });
  });
}

inline void run(const GatedLinear& op, const Run& step) {
  const Deltas deltas(op.delta, step);
  Element* const out = step.at(op.out);
  const int64_t out_stride = step.stride(op.out);
  multiply(step.instructions(), step.at(op.x), step.stride(op.x), step.batch.num_tokens, op.weight, op.num_outputs / 16,
           step.integers, [&](int64_t row, int64_t panel, const float* sums) {
             Floats gate = load(sums), up = load(sums + 16);
             if (op.bias) {
               gate = gate + load(op.bias + 16 * panel);
               up = up + load(op.bias + op.num_outputs + 16 * panel);
             }
             if (deltas.has(row)) {
               const int64_t count = op.num_deltas - 16 * panel;
               gate = deltas.add(row, 16 * panel, count, gate);
               up = deltas.add(row, op.num_deltas + 16 * panel, count, up);
             }
             store(out + row * out_stride + 16 * panel, gated(op.activation, gate, up));
           });
}

}  // namespace inflight
