// Products with a panel in vectors: by float32 FMA over elements that are widened in registers, or by vdpbf16ps.
//
// Both give the same bits. vdpbf16ps is two fused multiply-adds, the odd element of a pair before the even one, that
// round to nearest and take and give 0 for what is denormal; FMA does the same in that order while denormals are
// flushed. And a row's sums are added up in one order however many rows are multiplied with it, and by whatever
// vectors.
//
// AMX adds up in another order, which FMA can follow too: of a single row, whose weights come from memory, tiles would
// multiply more slowly.
#pragma once

#include <cstring>
#include <utility>

#include "groups.h"

namespace inflight {

/// Up to so many rows wait for memory: at most MAX_OF_FEW_ROWS of them are multiplied at once, and MAX_ROWS_IN_VECTORS
/// of more. In AVX-512 the 24 sums of six rows leave registers for two lines of weights, widened, and an element of x.
/// Four, six and eight at once of 32 rows of 1,536 give 350, 424 and 359 GFLOP/s by vdpbf16ps, 211, 233 and 209 by FMA.
/// But of 16 rows, whose weights come from memory, six at once take 1.03 to 1.06 of the time of four (one core of Zen
/// 5, 2026-11-22).
constexpr int64_t FEW_ROWS = 16;

/// How far ahead of a product memory is asked for, by the first of several passes over a panel: the others find it in a
/// cache, and to ask would take their time from loads (16 rows of float32 by AVX2: 39 instead of 46 GFLOP/s, Zen 4). Of
/// 1, 2, 4 and 8 KiB this one reads weights fastest: 31 GB/s where nothing but reading gives 33 (one token, 2 cores of
/// a Xeon, 2026-11-21).
constexpr int64_t AHEAD_BYTES = 2048;

/// A line times two floats of a row: fused multiply-adds, the odd one first.
template <class Lines>
struct Fused {
  using Read = Lines;
  using Left = float;
  /// Calls `multiply(column, elements)` for what is multiplied after each other: with one of the two rows at a time,
  /// registers of AVX2 suffice.
  template <class Multiply>
  static void read(const char* step, int tile, int r, Multiply multiply) {
    for (int column : {1, 0}) {
      Floats elements = column ? Lines::odd(step, tile, r) : Lines::even(step, tile, r);
      hold(elements);
      multiply(column, elements);
    }
  }
  static Floats add(Floats sum, const float* x, Floats elements) { return fma(splat(*x), elements, sum); }
};

#ifdef __AVX512BF16__
/// The same by vdpbf16ps.
template <class Lines>
struct Dotted {
  using Read = Lines;
  using Left = Bf16;
  template <class Multiply>
  static void read(const char* step, int tile, int r, Multiply multiply) {
    multiply(0, Lines::pairs(step, tile, r));
  }
  static Floats add(Floats sum, const Bf16* x, __m512i pairs) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)),
                            reinterpret_cast<__m512bh>(pairs));
  }
};
#endif

/// Part `i` of a panel, `PARTS` to a step. Its first line is read as a step's line 0.
template <class Lines, int PARTS>
inline const char* part_of(const char* panel, int64_t i) {
  return panel + i / PARTS * Lines::STEP_BYTES + i % PARTS * (Lines::STEP_BYTES / 2 / PARTS);
}

/// sums (ROWS, 32) = x @ panel, as `groups` puts them together. The stride of x in elements.
template <class Product, class Groups, bool AHEAD, int ROWS>
inline void product_of(const typename Product::Left* x, int64_t stride, const char* panel, const Groups& groups) {
  using Lines = typename Product::Read;
  constexpr int TILES = tiles_at_once(ROWS), LINES = 16 / Groups::PARTS;
  for (int first = 0; first < 2; first += TILES) {
    [[maybe_unused]] Floats totals[ROWS][TILES];
    for (int64_t group = 0; group < groups.count(); ++group) {
      // Two sums for each vector of the result: one alone would wait for itself.
      Floats kept[ROWS][TILES][2];
      for (int row = 0; row < ROWS; ++row)
        for (int tile = 0; tile < TILES; ++tile) {
          kept[row][tile][0] = groups.start(row, first + tile);
          kept[row][tile][1] = splat(0.0f);
        }
      for (int64_t i = groups.begin(group), end = groups.end(group); i < end; ++i) {
        const char* part = part_of<Lines, Groups::PARTS>(panel, i);
#pragma GCC unroll 16
        for (int r = 0; r < LINES; ++r)
          for (int tile = 0; tile < TILES; ++tile) {
            if (AHEAD) Lines::prefetch(part, first + tile, r, AHEAD_BYTES);
            Product::read(part, first + tile, r, [&](int column, auto elements) {
              const typename Product::Left* factors = x + 2 * LINES * i + 2 * r + column;
              for (int row = 0; row < ROWS; ++row)
                kept[row][tile][r % 2] = Product::add(kept[row][tile][r % 2], factors + row * stride, elements);
            });
          }
      }
      for (int row = 0; row < ROWS; ++row)
        for (int tile = 0; tile < TILES; ++tile) {
          const Floats sum = kept[row][tile][0] + kept[row][tile][1];
          if constexpr (KEEPS_TOTALS) {
            totals[row][tile] = groups.added(group, row, first + tile, sum, totals[row][tile]);
          } else {
            float* const total = groups.at(row, first + tile);
            store(total, groups.added(group, row, first + tile, sum, load(total)));
          }
        }
    }
    if constexpr (KEEPS_TOTALS)
      for (int row = 0; row < ROWS; ++row)
        for (int tile = 0; tile < TILES; ++tile) store(groups.at(row, first + tile), totals[row][tile]);
  }
}

template <class Product, class Groups>
using MultiplyRows = void (*)(const typename Product::Left*, int64_t, const char*, const Groups&);

/// By number of rows, from one on.
template <class Product, class Groups, bool AHEAD, int... ROWS>
inline MultiplyRows<Product, Groups> product_of_rows(int64_t num_rows, std::integer_sequence<int, ROWS...>) {
  static constexpr MultiplyRows<Product, Groups> functions[] = {product_of<Product, Groups, AHEAD, ROWS + 1>...};
  return functions[num_rows - 1];
}

/// The same for any number of rows, or for up to MAX_OF_FEW_ROWS, if the groups are for one pass over a panel.
template <class Product, class Groups>
inline void product_in_vectors(const typename Product::Left* x, int64_t stride, int64_t num_rows, const char* panel,
                               const Groups& groups) {
  constexpr std::make_integer_sequence<int, Groups::MAX_ROWS> counts;
  if constexpr (Groups::IN_ONE_PASS) {
    product_of_rows<Product, Groups, true>(num_rows, counts)(x, stride, panel, groups);
  } else {
    const int64_t most = num_rows <= FEW_ROWS ? MAX_OF_FEW_ROWS : Groups::MAX_ROWS;
    for (int64_t row = 0, count; row < num_rows; row += count) {
      // As even as can be: the fewer rows, the more of the time goes to weights.
      count = ceil_div(num_rows - row, ceil_div(num_rows - row, most));
      const auto multiply = row == 0 ? product_of_rows<Product, Groups, true>(count, counts)
                                     : product_of_rows<Product, Groups, false>(count, counts);
      multiply(x + row * stride, stride, panel, groups.from(row));
    }
  }
}

/// The sums that AMX gives, by float32 FMA: in each part the products of even and of odd elements are added up by
/// themselves, beginning with zero, and then both to the sum. (So Intel describes TDPBF16PS.)
template <class Lines, class Groups>
inline void product_as_in_tiles(const float* x, int64_t stride, int64_t num_rows, const char* panel,
                                const Groups& groups) {
  constexpr int LINES = 16 / Groups::PARTS;
  for (int64_t row = 0; row < num_rows; ++row, x += stride) {
    Floats totals[2];
    for (int64_t group = 0; group < groups.count(); ++group) {
      Floats kept[2] = {groups.start(row, 0), groups.start(row, 1)};
      for (int64_t i = groups.begin(group), end = groups.end(group); i < end; ++i) {
        const char* part = part_of<Lines, Groups::PARTS>(panel, i);
        Floats even[2] = {splat(0.0f), splat(0.0f)}, odd[2] = {splat(0.0f), splat(0.0f)};
#pragma GCC unroll 16
        for (int r = 0; r < LINES; ++r)
          for (int tile = 0; tile < 2; ++tile) {
            Lines::prefetch(part, tile, r, AHEAD_BYTES);
            const float* pair = x + 2 * LINES * i + 2 * r;
            even[tile] = fma(splat(pair[0]), Lines::even(part, tile, r), even[tile]);
            odd[tile] = fma(splat(pair[1]), Lines::odd(part, tile, r), odd[tile]);
          }
        for (int tile = 0; tile < 2; ++tile) kept[tile] = kept[tile] + (even[tile] + odd[tile]);
      }
      for (int tile = 0; tile < 2; ++tile) totals[tile] = groups.added(group, row, tile, kept[tile], totals[tile]);
    }
    for (int tile = 0; tile < 2; ++tile) store(groups.at(row, tile), totals[tile]);
  }
}

}  // namespace inflight
