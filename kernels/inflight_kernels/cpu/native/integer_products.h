// Products of whole numbers with a panel: rows that are quantised to 8 bits, each group of inputs by itself, times
// codes of 8 or 4 bits.
//
// A panel is laid out for instructions that add up four products at once. A step is 64 inputs: two tiles of 16 columns,
// a tile 16 lines of 64 bytes, and line l has, for each of the 16 columns, the inputs 4l to 4l + 3 of that step: what
// AMX's tiles and vpdpbusd multiply. Of 4 bits two lines share 64 bytes, 2m in the lower halves of bytes and 2m + 1 in
// the upper ones; they are stored 8 higher, from 0 on.
//
// Sums of a group are exact, so all instructions give the same bits, also AMX, whatever the order of float products is.
// What remains is in one order: a row's result is the sum over its groups, from the first on, of
// scale of x * scale of the weight * (sum - zero * sum of x).
#pragma once

#include "products.h"
#include "quantize.h"

namespace inflight {

/// Inputs of a step.
constexpr int64_t INTEGER_STEP = 64;
/// All matrices have a multiple of so many inputs, and groups too, but for those of half as many.
constexpr int64_t UNIT = 32;
constexpr int64_t LINE_BYTES = 64, INTEGER_TILE_BYTES = 16 * LINE_BYTES;

/// Rows, quantised: a number is scale * value.
struct IntegerRows {
  int64_t num_rows, step_bytes, num_groups;
  /// 64 inputs of all rows, 32 more than there are, before the next 64: what tiles load lies side by side. Behind the
  /// last input zeros.
  int8_t* values;
  /// (num_rows, num_groups) each, with room for 32 rows more; `sums` are those of the values.
  float* scales;
  int32_t* sums;

  /// For the inputs of a matrix, taken from `pieces`.
  static IntegerRows take(int64_t num_rows, const Matrix& matrix, Pieces& pieces) {
    const int64_t num_steps = ceil_div(matrix.num_inputs, INTEGER_STEP), room = num_rows + ROWS_AT_ONCE;
    const int64_t count = room * matrix.num_groups;
    // An odd number of lines: those of one row would take few places of the caches otherwise.
    const int64_t step_bytes = (room | 1) * INTEGER_STEP;
    return {num_rows,
            step_bytes,
            matrix.num_groups,
            pieces.take<int8_t>(num_steps * step_bytes),
            pieces.take<float>(count),
            pieces.take<int32_t>(count)};
  }

  int8_t* at(int64_t row, int64_t input) const {
    return values + input / INTEGER_STEP * step_bytes + row * INTEGER_STEP + input % INTEGER_STEP;
  }
  /// Up to `count` of them.
  IntegerRows some(int64_t first, int64_t count) const {
    const int64_t of_groups = first * num_groups;
    return {
        std::min(count, num_rows - first), step_bytes, num_groups, at(first, 0), scales + of_groups, sums + of_groups};
  }
};

/// One row of a matrix's inputs.
inline void quantize_row(const Element* x, const Matrix& matrix, const IntegerRows& rows, int64_t row) {
  for (int64_t group = 0; group < matrix.num_groups; ++group) {
    const int64_t first = group * matrix.group_size, place = row * rows.num_groups + group;
    Floats total = splat(0.0f);
    const float scale = quantize(
        x, first, std::min(first + matrix.group_size, matrix.num_inputs), [&](int64_t i) { return rows.at(row, i); },
        total);
    rows.scales[place] = scale;
    rows.sums[place] = std::isfinite(scale) ? static_cast<int32_t>(sum(total)) : 0;
  }
  if (matrix.num_inputs % INTEGER_STEP) std::fill_n(rows.at(row, matrix.num_inputs), UNIT, 0);
}

/// Some rows, in this thread's own room.
inline IntegerRows quantize_rows(const Element* x, int64_t stride, int64_t num_rows, const Matrix& matrix) {
  Pieces size{nullptr};
  IntegerRows::take(num_rows, matrix, size);
  Pieces pieces{own_room<IntegerRows, char>(size.num_bytes)};
  const IntegerRows rows = IntegerRows::take(num_rows, matrix, pieces);
  for (int64_t row = 0; row < num_rows; ++row) quantize_row(x + row * stride, matrix, rows, row);
  return rows;
}

/// How a product reads lines of a panel.
template <WeightFormat FORMAT>
struct IntegerCodes;

template <>
struct IntegerCodes<WeightFormat::INT8> {
  static constexpr int64_t TILE_BYTES = INTEGER_TILE_BYTES;
  /// What is added to each number of the checkpoint.
  static constexpr int32_t OFFSET = INT8_OFFSET;

  /// `LINES` lines from `line` on of a tile. Calls `multiply(n, codes)` for each of them.
  template <int LINES, class Multiply>
  static void read_unit(const char* tile, int line, Multiply multiply) {
#pragma GCC unroll 8
    for (int n = 0; n < LINES; ++n) multiply(n, with_offset(load_whole(tile + LINE_BYTES * (line + n))));
  }
  static Ints begin(Ints sums) { return sums; }
  static Ints add(Ints part, Ints codes, int32_t numbers) { return add_products(part, codes, numbers); }
  static Ints end(Ints, Ints part) { return part; }
};

template <>
struct IntegerCodes<WeightFormat::INT4> {
  static constexpr int64_t TILE_BYTES = INTEGER_TILE_BYTES / 2;
  static constexpr int32_t OFFSET = 8;

  template <int LINES, class Multiply>
  static void read_unit(const char* tile, int line, Multiply multiply) {
#pragma GCC unroll 8
    for (int n = 0; n < LINES; n += 2) {
      const Ints both = load_whole(tile + LINE_BYTES / 2 * (line + n));
      multiply(n, low_halves(both));
      multiply(n + 1, high_halves(both));
    }
  }
  static Ints begin(Ints sums) { return begin_small(sums); }
  static Ints add(Ints part, Ints codes, int32_t numbers) { return add_small(part, codes, numbers); }
  static Ints end(Ints sums, Ints part) { return end_small(sums, part); }
};

/// A total of no groups: to add a product to it is to round that product, whose sign stays when it is zero.
constexpr float NOTHING = -0.0f;

/// What the sums of a group make of the total of the groups before it, for sixteen columns of one row.
struct IntegerGroups {
  const Matrix& matrix;
  Shared shared;
  const IntegerRows& rows;

  int64_t begin(int64_t group) const { return group * matrix.group_size; }
  int64_t end(int64_t group) const { return std::min((group + 1) * matrix.group_size, matrix.num_inputs); }
  int64_t place(int64_t row, int64_t group) const { return row * rows.num_groups + group; }

  /// `sums` are of products with codes that are `offset` higher.
  Floats added(int64_t group, int64_t row, int tile, Floats sums, Floats total) const {
    const int64_t column = group * PANEL + 16 * tile;
    if (matrix.zeros)
      sums = fnma(splat(static_cast<float>(rows.sums[place(row, group)])), load(shared.zeros + column), sums);
    const Floats scaled = sums * splat(rows.scales[place(row, group)]), scales = load(shared.scales + column);
    return fma(scaled, scales, total);
  }
};

/// sums (ROWS, 32) = x @ panel, of the first ROWS rows. Groups consist of units of `LINES` lines.
template <WeightFormat FORMAT, int LINES, int ROWS>
inline void integer_product_of(const IntegerRows& x, const char* panel, const IntegerGroups& groups, bool ahead,
                               float* sums) {
  using Codes = IntegerCodes<FORMAT>;
  constexpr int TILES = tiles_at_once(ROWS);
  for (int first = 0; first < 2; first += TILES) {
    Floats totals[ROWS][TILES];
    for (auto& of_row : totals)
      for (Floats& total : of_row) total = splat(NOTHING);
    int64_t i = 0;
    for (int64_t group = 0; group < x.num_groups; ++group) {
      Ints kept[ROWS][TILES];
      for (int row = 0; row < ROWS; ++row)
        for (int tile = 0; tile < TILES; ++tile)
          kept[row][tile] = whole(-Codes::OFFSET * x.sums[groups.place(row, group)]);
      for (const int64_t end = groups.end(group); i < end; i += 4 * LINES) {
        const int8_t* const numbers = x.at(0, i);
        const char* const step = panel + i / INTEGER_STEP * 2 * Codes::TILE_BYTES;
        const int line = static_cast<int>(i % INTEGER_STEP / 4);
        for (int tile = 0; tile < TILES; ++tile) {
          const char* const lines = step + (first + tile) * Codes::TILE_BYTES;
          if (ahead)
            prefetch_lines(lines + line * Codes::TILE_BYTES / 16 + AHEAD_BYTES, LINES * Codes::TILE_BYTES / 16 / 64);
          Ints parts[ROWS];
          for (int row = 0; row < ROWS; ++row) parts[row] = Codes::begin(kept[row][tile]);
          Codes::template read_unit<LINES>(lines, line, [&](int n, Ints codes) {
            for (int row = 0; row < ROWS; ++row) {
              int32_t four;
              std::memcpy(&four, numbers + row * INTEGER_STEP + 4 * n, sizeof four);
              parts[row] = Codes::add(parts[row], codes, four);
            }
          });
          for (int row = 0; row < ROWS; ++row) kept[row][tile] = Codes::end(kept[row][tile], parts[row]);
        }
      }
      for (int row = 0; row < ROWS; ++row)
        for (int tile = 0; tile < TILES; ++tile)
          totals[row][tile] = groups.added(group, row, first + tile, to_floats(kept[row][tile]), totals[row][tile]);
    }
    for (int row = 0; row < ROWS; ++row)
      for (int tile = 0; tile < TILES; ++tile) store(sums + row * PANEL + 16 * (first + tile), totals[row][tile]);
  }
}

/// By number of rows, from one on.
template <WeightFormat FORMAT, int LINES, int... ROWS>
inline auto integer_product_of_rows(int64_t num_rows, std::integer_sequence<int, ROWS...>) {
  using Multiply = void (*)(const IntegerRows&, const char*, const IntegerGroups&, bool, float*);
  static constexpr Multiply functions[] = {integer_product_of<FORMAT, LINES, ROWS + 1>...};
  return functions[num_rows - 1];
}

/// The same for up to 32 rows.
template <WeightFormat FORMAT, int LINES>
inline void integer_product_in_vectors(const IntegerRows& x, const char* panel, const Matrix& matrix, Shared shared,
                                       float* sums) {
  constexpr std::make_integer_sequence<int, MAX_ROWS_OF_INTEGERS> counts;
  for (int64_t row = 0, count; row < x.num_rows; row += count) {
    count = ceil_div(x.num_rows - row, ceil_div(x.num_rows - row, MAX_ROWS_OF_INTEGERS));
    const IntegerRows some = x.some(row, count);
    // The first of several passes over a panel asks for memory.
    integer_product_of_rows<FORMAT, LINES>(count, counts)(some, panel, {matrix, shared, some}, row == 0,
                                                          sums + row * PANEL);
  }
}

#ifdef __AMX_INT8__
/// How far ahead memory is asked for, by the first of several passes over a panel.
constexpr int64_t TILES_AHEAD = 6;
/// Groups whose sums leave the tiles before the first of them are read, and rows whose totals stay in registers then.
constexpr int64_t GROUPS_AT_ONCE = 4, TOTALS_AT_ONCE = 8;
/// Sums of whole numbers of a group.
using Sums = int32_t[ROWS_AT_ONCE][PANEL];

/// sums (32, 32) = x @ panel from input `first` to below `end`, whole parts of steps, `PARTS` to a step; codes are one
/// in a byte.
template <int PARTS>
inline void integer_product_in_tiles(const IntegerRows& x, const char* codes, int64_t first, int64_t end, bool ahead,
                                     Sums& sums) {
  constexpr int64_t ROW_BYTES = PANEL * 4;
  const bool has_lower = x.num_rows > 16;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = first; i < end; i += INTEGER_STEP / PARTS) {
    const char* const part = codes + i / INTEGER_STEP * 2 * INTEGER_TILE_BYTES + i % INTEGER_STEP / 4 * LINE_BYTES;
    const int8_t* const numbers = x.at(0, i);
    if (ahead)
      for (int tile = 0; tile < 2; ++tile) prefetch_lines(part + (TILES_AHEAD + tile) * INTEGER_TILE_BYTES, 16 / PARTS);
    _tile_loadd(4, numbers, INTEGER_STEP);
    _tile_loadd(6, part, LINE_BYTES);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, part + INTEGER_TILE_BYTES, LINE_BYTES);
    _tile_dpbssd(1, 4, 7);
    if (!has_lower) continue;
    _tile_loadd(5, numbers + INTEGER_TILE_BYTES, INTEGER_STEP);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_stored(0, sums[0], ROW_BYTES);
  _tile_stored(1, sums[0] + 16, ROW_BYTES);
  if (has_lower) {
    _tile_stored(2, sums[16], ROW_BYTES);
    _tile_stored(3, sums[16] + 16, ROW_BYTES);
  }
}

/// totals (8, 16 of 32): what the sums of the groups from `first` to below `end` make of those of the groups before.
inline void add_groups(const IntegerGroups& groups, int64_t first, int64_t end, int64_t row, int tile, const Sums* sums,
                       float* totals) {
  Floats kept[TOTALS_AT_ONCE];
  for (int n = 0; n < TOTALS_AT_ONCE; ++n) kept[n] = first ? load(totals + n * PANEL) : splat(NOTHING);
  for (int64_t group = first; group < end; ++group, ++sums)
#pragma GCC unroll 8
    for (int n = 0; n < TOTALS_AT_ONCE; ++n)
      kept[n] = groups.added(group, row + n, tile, to_floats(load_whole((*sums)[row + n] + 16 * tile)), kept[n]);
  for (int n = 0; n < TOTALS_AT_ONCE; ++n) store(totals + n * PANEL, kept[n]);
}
#endif

/// Rows that a thread multiplies with panels of a matrix of codes, 32 at a time.
class IntegerProduct {
 public:
  IntegerProduct(const IntegerRows& rows, const Matrix& matrix) : matrix_(matrix), rows_(rows) {}

  /// Bytes of a panel's codes.
  static int64_t panel_bytes(const Matrix& matrix) {
    const int64_t bytes = round_up(matrix.num_inputs, INTEGER_STEP) * PANEL;
    return matrix.format == WeightFormat::INT8 ? bytes : bytes / 2;
  }

  /// See MatrixProduct.
  void multiply(int64_t panel, int64_t first, float* sums) const {
    if (matrix_.format == WeightFormat::INT8)
      multiply<WeightFormat::INT8>(panel, first, sums);
    else
      multiply<WeightFormat::INT4>(panel, first, sums);
  }

 private:
  template <WeightFormat FORMAT>
  void multiply(int64_t panel, int64_t first, float* sums) const {
    if (matrix_.num_groups == 1 || matrix_.group_size % INTEGER_STEP == 0)
      multiply<FORMAT, 1>(panel, first, sums);
    else if (matrix_.group_size % UNIT == 0)
      multiply<FORMAT, 2>(panel, first, sums);
    else
      multiply<FORMAT, 4>(panel, first, sums);
  }

  /// Groups consist of parts of a step, `PARTS` to a step.
  template <WeightFormat FORMAT, int PARTS>
  void multiply(int64_t panel, int64_t first, float* sums) const {
    const char* const codes = static_cast<const char*>(matrix_.values) + panel * panel_bytes(matrix_);
    const Shared shared = share_floats(matrix_, panel, first != 0);
    const IntegerRows rows = rows_.some(first, ROWS_AT_ONCE);
#ifdef __AMX_INT8__
    if (rows_.num_rows >= fewest_in_tiles(FORMAT, PARTS)) {
      const char* const single = first == 0 ? one_in_a_byte<FORMAT>(codes) : last_in_a_byte<FORMAT>(codes);
      const bool ahead = FORMAT == WeightFormat::INT8 && first == 0;
      return multiply_in_tiles<PARTS>({matrix_, shared, rows}, single, ahead, sums);
    }
#endif
    integer_product_in_vectors<FORMAT, UNIT / (PARTS == 4 ? 8 : 4)>(rows, codes, matrix_, shared, sums);
  }

#ifdef __AMX_INT8__
  /// Fewer are multiplied faster in vectors: the more of them the smaller groups are, and where codes are not yet one
  /// in a byte.
  static constexpr int64_t fewest_in_tiles(WeightFormat format, int parts) {
    return (format == WeightFormat::INT8 ? 5 : 9) + (parts == 1 ? 0 : parts == 2 ? 4 : 8);
  }

  template <int PARTS>
  static void multiply_in_tiles(const IntegerGroups& groups, const char* codes, bool ahead, float* totals) {
    const TilesOfParts<PARTS> tiles;
    alignas(64) Sums sums[GROUPS_AT_ONCE];
    const IntegerRows& rows = groups.rows;
    for (int64_t first = 0; first < rows.num_groups; first += GROUPS_AT_ONCE) {
      const int64_t end = std::min(first + GROUPS_AT_ONCE, rows.num_groups);
      settle_memory();
      for (int64_t group = first; group < end; ++group)
        integer_product_in_tiles<PARTS>(rows, codes, groups.begin(group), groups.end(group), ahead,
                                        sums[group - first]);
      settle_memory();
      for (int64_t row = 0; row < rows.num_rows; row += TOTALS_AT_ONCE)
        for (int tile = 0; tile < 2; ++tile)
          add_groups(groups, first, end, row, tile, sums, totals + row * PANEL + 16 * tile);
    }
  }

  /// The lines of a panel, for tiles, which want each code in a byte.
  template <WeightFormat FORMAT>
  const char* one_in_a_byte(const char* codes) const {
    if constexpr (FORMAT == WeightFormat::INT8) {
      return codes;
    } else {
      const int64_t count = round_up(matrix_.num_inputs, INTEGER_STEP) * PANEL;
      char* const bytes = own_room<IntegerProduct, char>(count);
      const Ints offset = whole(0x01010101 * IntegerCodes<FORMAT>::OFFSET);
      for (int64_t i = 0; i < count; i += 2 * LINE_BYTES) {
        const Ints both = load_whole(codes + i / 2);
        prefetch_lines(codes + i / 2 + AHEAD_BYTES, 1);
        store_whole(bytes + i, less_in_bytes(low_halves(both), offset));
        store_whole(bytes + i + LINE_BYTES, less_in_bytes(high_halves(both), offset));
      }
      return bytes;
    }
  }
  template <WeightFormat FORMAT>
  static const char* last_in_a_byte(const char* codes) {
    return FORMAT == WeightFormat::INT8 ? codes : own_room<IntegerProduct, char>(0);
  }
#endif

  const Matrix& matrix_;
  IntegerRows rows_;
};

}  // namespace inflight
