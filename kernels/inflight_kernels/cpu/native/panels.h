// Products with a panel: 32 columns of a bfloat16 matrix, laid out so that a product reads memory once and in order.
//
// A panel of I rows is I / 32 steps. A step is two tiles of 16 columns, a tile 16 lines of 64 bytes, and line r of it
// holds, for each of the 16 columns, the rows 2r and 2r + 1 of that step side by side: what AMX and vdpbf16ps multiply.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

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
inline void pack_rows(const Bf16* const (&from)[PANEL], Bf16* step) {
  for (int tile = 0; tile < 2; ++tile) {
    __m512i lines[16];
    for (int n = 0; n < 16; ++n) {
      const Bf16* row = from[16 * tile + n];
      lines[n] = row ? _mm512_loadu_si512(row) : _mm512_setzero_si512();
    }
    transpose(lines);
    for (int r = 0; r < 16; ++r) _mm512_storeu_si512(step + 512 * tile + 32 * r, lines[r]);
  }
}

/// The step of a panel whose row i is row i of `from`, at its elements 0 to 31; zeros for the rows that it has not.
inline void pack_columns(const Bf16* const (&from)[PANEL], Bf16* step) {
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                              6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int r = 0; r < 16; ++r) {
    for (int tile = 0; tile < 2; ++tile) {
      __m256i halves[2];
      for (int odd = 0; odd < 2; ++odd) {
        const Bf16* row = from[2 * r + odd];
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

/// sums (ROWS, 32) = x @ panel, or sums += x @ panel, a row of x being broadcast over vectors. Strides in elements.
template <int ROWS, bool ADD>
inline void product_of_vectors(const Bf16* x, int64_t stride, const Bf16* panel, int64_t num_steps, float* sums,
                               int64_t sums_stride) {
  // Two sums for each vector of the result: one alone would wait for itself.
  Floats kept[ROWS][2][2];
  for (int row = 0; row < ROWS; ++row)
    for (int tile = 0; tile < 2; ++tile) {
      kept[row][tile][0] = ADD ? _mm512_loadu_ps(sums + row * sums_stride + 16 * tile) : splat(0.0f);
      kept[row][tile][1] = splat(0.0f);
    }
  const char* step = reinterpret_cast<const char*>(panel);
  for (int64_t i = 0; i < num_steps; ++i, step += STEP_BYTES) {
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      __m512bh columns[2];
      for (int tile = 0; tile < 2; ++tile) {
        const char* line = step + tile * TILE_BYTES + 64 * r;
        _mm_prefetch(line + AHEAD_BYTES, _MM_HINT_T0);
        columns[tile] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(line));
      }
      for (int row = 0; row < ROWS; ++row) {
        int32_t pair;
        std::memcpy(&pair, x + row * stride + 32 * i + 2 * r, sizeof pair);
        const __m512bh left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        for (int tile = 0; tile < 2; ++tile)
          kept[row][tile][r % 2] = _mm512_dpbf16_ps(kept[row][tile][r % 2], left, columns[tile]);
      }
    }
  }
  for (int row = 0; row < ROWS; ++row)
    for (int tile = 0; tile < 2; ++tile)
      _mm512_storeu_ps(sums + row * sums_stride + 16 * tile, _mm512_add_ps(kept[row][tile][0], kept[row][tile][1]));
}

#ifdef __AMX_BF16__

/// More go through tiles. Of 212 MB, one row: 31 GB/s in vectors, 25 in tiles; the layers of a step of two to four rows
/// take 8.3 to 9.0 ms in tiles, 9.2 to 10.0 in vectors (2 cores of a Xeon, 2026-11-21).
constexpr int64_t MAX_ROWS_IN_VECTORS = 1;

/// Ask the system for the tiles; false where it has none to give. Once a process.
inline bool request_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// Tiles of this thread while it lives: eight of 16 lines of 64 bytes.
class Tiles {
 public:
  Tiles() {
    // In memory for good: gcc 12 takes the intrinsic to read eight bytes of it and would not write the others.
    static constexpr TileConfig config;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

/// What was stored before is in memory for the tiles to load: gcc's intrinsics do not say that they read it.
inline void settle_memory() { asm volatile("" ::: "memory"); }

/// The same for 16 rows, in tiles.
template <bool ADD>
inline void product_of_16(const Bf16* x, int64_t stride, const Bf16* panel, int64_t num_steps, float* sums,
                          int64_t sums_stride) {
  settle_memory();
  if (ADD) {
    _tile_loadd(0, sums, sums_stride * 4);
    _tile_loadd(1, sums + 16, sums_stride * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  const char* step = reinterpret_cast<const char*>(panel);
  for (int64_t i = 0; i < num_steps; ++i, step += STEP_BYTES) {
    _tile_loadd(4, x + PANEL * i, stride * 2);
    prefetch_lines(step + AHEAD_BYTES, 16);
    _tile_loadd(6, step, 64);
    _tile_dpbf16ps(0, 4, 6);
    prefetch_lines(step + AHEAD_BYTES + TILE_BYTES, 16);
    _tile_loadd(7, step + TILE_BYTES, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums, sums_stride * 4);
  _tile_stored(1, sums + 16, sums_stride * 4);
}

/// The same for 32 rows. What is ahead is asked for between the tiles: asked for at once it makes the product slower
/// than not at all (1.2, 0.9 and 1.5 TFLOP/s a core from the second cache without, at once, and so).
template <bool ADD>
inline void product_of_32(const Bf16* x, int64_t stride, const Bf16* panel, int64_t num_steps, float* sums,
                          int64_t sums_stride) {
  const Bf16* lower = x + 16 * stride;
  float* lower_sums = sums + 16 * sums_stride;
  settle_memory();
  if (ADD) {
    _tile_loadd(0, sums, sums_stride * 4);
    _tile_loadd(1, sums + 16, sums_stride * 4);
    _tile_loadd(2, lower_sums, sums_stride * 4);
    _tile_loadd(3, lower_sums + 16, sums_stride * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const char* step = reinterpret_cast<const char*>(panel);
  for (int64_t i = 0; i < num_steps; ++i, step += STEP_BYTES) {
    const char* ahead = step + 3 * STEP_BYTES;
    _tile_loadd(4, x + PANEL * i, stride * 2);
    prefetch_lines(ahead, 8);
    _tile_loadd(6, step, 64);
    _tile_dpbf16ps(0, 4, 6);
    prefetch_lines(ahead + 512, 8);
    _tile_loadd(7, step + TILE_BYTES, 64);
    _tile_dpbf16ps(1, 4, 7);
    prefetch_lines(ahead + 1024, 8);
    _tile_loadd(5, lower + PANEL * i, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    prefetch_lines(ahead + 1536, 8);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, sums_stride * 4);
  _tile_stored(1, sums + 16, sums_stride * 4);
  _tile_stored(2, lower_sums, sums_stride * 4);
  _tile_stored(3, lower_sums + 16, sums_stride * 4);
}

#else

constexpr int64_t MAX_ROWS_IN_VECTORS = 4;

inline bool request_tiles() { return true; }

class Tiles {
 public:
  Tiles() {}
};

template <bool ADD>
inline void product_of_16(const Bf16* x, int64_t stride, const Bf16* panel, int64_t num_steps, float* sums,
                          int64_t sums_stride) {
  constexpr int ROWS = 4;
  for (int row = 0; row < 16; row += ROWS)
    product_of_vectors<ROWS, ADD>(x + row * stride, stride, panel, num_steps, sums + row * sums_stride, sums_stride);
}

template <bool ADD>
inline void product_of_32(const Bf16* x, int64_t stride, const Bf16* panel, int64_t num_steps, float* sums,
                          int64_t sums_stride) {
  product_of_16<ADD>(x, stride, panel, num_steps, sums, sums_stride);
  product_of_16<ADD>(x + 16 * stride, stride, panel, num_steps, sums + 16 * sums_stride, sums_stride);
}

#endif

/// sums (num_rows, 32) = x @ panel, or sums += x @ panel, for at most 32 rows; x and sums have room for 32.
template <bool ADD>
inline void product(const Bf16* x, int64_t stride, int64_t num_rows, const Bf16* panel, int64_t num_steps, float* sums,
                    int64_t sums_stride) {
  if (num_rows == 1) return product_of_vectors<1, ADD>(x, stride, panel, num_steps, sums, sums_stride);
  if (num_rows <= MAX_ROWS_IN_VECTORS)
    return product_of_vectors<4, ADD>(x, stride, panel, num_steps, sums, sums_stride);
  if (num_rows <= 16) return product_of_16<ADD>(x, stride, panel, num_steps, sums, sums_stride);
  product_of_32<ADD>(x, stride, panel, num_steps, sums, sums_stride);
}

}  // namespace inflight
