// Panels: 32 columns of a matrix, laid out so that a product reads memory once and in order.
//
// A panel of I rows is I / 32 steps. A step is two tiles of 16 columns, a tile 16 lines, and line r of it holds, for
// each of the 16 columns, the rows 2r and 2r + 1 of that step. In bfloat16 the two of a column stand side by side: what
// AMX and vdpbf16ps multiply. In other formats the 16 of row 2r stand before those of row 2r + 1.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace inflight {

/// Columns of a panel, and rows of a step.
constexpr int64_t PANEL = 32;
/// Elements of a line, of a tile and of a step.
constexpr int64_t LINE = 32, TILE = 16 * LINE, STEP = 2 * TILE;

inline int64_t panel_elements(int64_t num_rows) { return num_rows * PANEL; }

/// Row 2r or 2r + 1 of line r, for its 16 columns.
template <class Format>
inline Floats load_even(const Format* line) {
  return load(line);
}
template <class Format>
inline Floats load_odd(const Format* line) {
  return load(line + 16);
}
inline Floats load_even(const Bf16* line) { return even_of_pairs(line); }
inline Floats load_odd(const Bf16* line) { return odd_of_pairs(line); }

/// How a product reads the steps of a panel whose elements are of one format. Codes of weights are read likewise
/// (codes.h).
template <class Format>
struct Plain {
  static constexpr int64_t STEP_BYTES = STEP * sizeof(Format);
  static const Format* line(const char* step, int tile, int r) {
    return reinterpret_cast<const Format*>(step) + TILE * tile + LINE * r;
  }
  static Floats even(const char* step, int tile, int r) { return load_even(line(step, tile, r)); }
  static Floats odd(const char* step, int tile, int r) { return load_odd(line(step, tile, r)); }
#ifdef __AVX512BF16__
  /// Both, as pairs of bfloat16.
  static __m512i pairs(const char* step, int tile, int r) { return _mm512_loadu_si512(line(step, tile, r)); }
#endif
  /// Asks for the memory of a line that is so many bytes behind it.
  static void prefetch(const char* step, int tile, int r, int64_t ahead) {
    prefetch_lines(reinterpret_cast<const char*>(line(step, tile, r)) + ahead, LINE * sizeof(Format) / 64);
  }
};

inline void store_line(Bf16* line, Floats even, Floats odd) { store_pairs(line, even, odd); }
template <class Format>
inline void store_line(Format* line, Floats even, Floats odd) {
  store(line, even);
  store(line + 16, odd);
}

/// What stands for rows that a panel does not have.
template <class Format>
inline const Format* zeros() {
  static const Format row[PANEL] = {};
  return row;
}

/// The step of a panel whose column n is row n of `from`, at its elements 0 to 31; zeros for the rows that it has not.
template <class Format>
inline void pack_rows(const Format* const (&from)[PANEL], Format* step) {
  for (int tile = 0; tile < 2; ++tile)
    for (int half = 0; half < 2; ++half) {
      Floats lines[16];
      for (int n = 0; n < 16; ++n) {
        const Format* row = from[16 * tile + n];
        lines[n] = load((row ? row : zeros<Format>()) + 16 * half);
      }
      transpose(lines);
      for (int i = 0; i < 16; ++i) store(step + TILE * tile + 16 * (16 * half + i), lines[i]);
    }
}
inline void pack_rows(const Bf16* const (&from)[PANEL], Bf16* step) {
  for (int tile = 0; tile < 2; ++tile) {
    Floats pairs[16];  // moved, not computed with
    for (int n = 0; n < 16; ++n) {
      const Bf16* row = from[16 * tile + n];
      pairs[n] = load(reinterpret_cast<const float*>(row ? row : zeros<Bf16>()));
    }
    transpose(pairs);
    for (int r = 0; r < 16; ++r) store(reinterpret_cast<float*>(step + TILE * tile + LINE * r), pairs[r]);
  }
}

/// The step of a panel whose row i is row i of `from`, at its elements 0 to 31; zeros for the rows that it has not.
template <class Format>
inline void pack_columns(const Format* const (&from)[PANEL], Format* step) {
  for (int i = 0; i < PANEL; ++i) {
    const Format* row = from[i] ? from[i] : zeros<Format>();
    for (int tile = 0; tile < 2; ++tile) std::copy_n(row + 16 * tile, 16, step + TILE * tile + 16 * i);
  }
}
inline void pack_columns(const Bf16* const (&from)[PANEL], Bf16* step) {
  for (int r = 0; r < 16; ++r) {
    const Bf16* even = from[2 * r] ? from[2 * r] : zeros<Bf16>();
    const Bf16* odd = from[2 * r + 1] ? from[2 * r + 1] : zeros<Bf16>();
    for (int tile = 0; tile < 2; ++tile) interleave(even + 16 * tile, odd + 16 * tile, step + TILE * tile + LINE * r);
  }
}

}  // namespace inflight
