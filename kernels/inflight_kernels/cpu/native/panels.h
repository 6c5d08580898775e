// Panels: 32 columns of a bfloat16 matrix, laid out so that a product reads memory once and in order.
//
// A panel of I rows is I / 32 steps. A step is two tiles of 16 columns, a tile 16 lines of 64 bytes, and line r of it
// holds, for each of the 16 columns, the rows 2r and 2r + 1 of that step side by side: what AMX and vdpbf16ps multiply.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace inflight {

/// Columns of a panel, rows of a step, and rows of the left matrix that are multiplied at once.
constexpr int64_t PANEL = 32;
constexpr int64_t TILE_BYTES = 1024, STEP_BYTES = 2 * TILE_BYTES;
/// How far ahead of a product memory is asked for. Of 1, 2, 4 and 8 KiB this one reads weights fastest: 31 GB/s where
/// nothing but reading gives 33 (one token, 2 cores of a Xeon, 2026-11-21).
constexpr int64_t AHEAD_BYTES = STEP_BYTES;

inline int64_t panel_elements(int64_t num_rows) { return num_rows * PANEL; }

/// The step of a panel whose column n is row n of `from`, at its elements 0 to 31; zeros for the rows that it has not.
inline void pack_rows(const Element* const (&from)[PANEL], Element* step) {
  for (int tile = 0; tile < 2; ++tile) {
    __m512i lines[16];
    for (int n = 0; n < 16; ++n) {
      const Element* row = from[16 * tile + n];
      lines[n] = row ? _mm512_loadu_si512(row) : _mm512_setzero_si512();
    }
    transpose(lines);
    for (int r = 0; r < 16; ++r) _mm512_storeu_si512(step + 512 * tile + 32 * r, lines[r]);
  }
}

/// The step of a panel whose row i is row i of `from`, at its elements 0 to 31; zeros for the rows that it has not.
inline void pack_columns(const Element* const (&from)[PANEL], Element* step) {
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                              6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int r = 0; r < 16; ++r) {
    for (int tile = 0; tile < 2; ++tile) {
      __m256i halves[2];
      for (int odd = 0; odd < 2; ++odd) {
        const Element* row = from[2 * r + odd];
        halves[odd] =
            row ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 16 * tile)) : _mm256_setzero_si256();
      }
      const __m512i line = _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1);
      _mm512_storeu_si512(step + 512 * tile + 32 * r, _mm512_permutexvar_epi16(interleave, line));
    }
  }
}

inline void prefetch_lines(const char* from, int count) {
  for (int line = 0; line < count; ++line) _mm_prefetch(from + 64 * line, _MM_HINT_T0);
}

}  // namespace inflight
