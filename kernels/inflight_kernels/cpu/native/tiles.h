// Products with a panel in AMX's tiles, where compiler and processor have them.
//
// Tiles add up in an order of their own, which `product_as_in_tiles` follows in vectors.
#pragma once

#include "panels.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace inflight {

#ifdef __AMX_BF16__

/// Ask the system for the tiles; false where there are none to give. Once a process.
inline bool request_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/// Of tiles whose products are of a part of a step, `PARTS` to a step: those of x, 4 and 5, have so many columns, and
/// those of weights, 6 and 7, so many lines.
template <int PARTS>
struct alignas(64) TileConfig {
  static constexpr int LINES = 16 / PARTS, BYTES = 64 / PARTS;
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {64, 64, 64, 64, BYTES, BYTES, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, LINES, LINES};
};

/// From now on the tiles of this thread are of these sizes, and hold zeros.
template <int PARTS>
inline void configure_tiles() {
  // In memory for good: gcc 12 takes the intrinsic to read eight bytes of it and would not write the others.
  static constexpr TileConfig<PARTS> config;
  _tile_loadconfig(&config);
}

/// Tiles of this thread while it lives: eight of 16 lines of 64 bytes.
class Tiles {
 public:
  Tiles() { configure_tiles<1>(); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

/// While it lives, what multiplies a step multiplies a part of it: from where x and panel begin.
template <int PARTS>
class TilesOfParts {
 public:
  TilesOfParts() {
    if (PARTS > 1) configure_tiles<PARTS>();
  }
  ~TilesOfParts() {
    if (PARTS > 1) configure_tiles<1>();
  }
  TilesOfParts(const TilesOfParts&) = delete;
};

constexpr int64_t TILE_BYTES = 1024, STEP_BYTES = 2 * TILE_BYTES;

/// What was stored before is in memory for the tiles to load: gcc's intrinsics do not say that they read it.
inline void settle_memory() { asm volatile("" ::: "memory"); }

/// sums (16, 32) = x @ panel, or sums += x @ panel. Strides in elements.
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
    prefetch_lines(step + STEP_BYTES, 16);
    _tile_loadd(6, step, 64);
    _tile_dpbf16ps(0, 4, 6);
    prefetch_lines(step + STEP_BYTES + TILE_BYTES, 16);
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

/// The same for at most 32 rows; x and sums have room for 32.
template <bool ADD>
inline void product_in_tiles(const Bf16* x, int64_t stride, int64_t num_rows, const Bf16* panel, int64_t num_steps,
                             float* sums, int64_t sums_stride) {
  const auto multiply_rows = num_rows <= 16 ? product_of_16<ADD> : product_of_32<ADD>;
  multiply_rows(x, stride, panel, num_steps, sums, sums_stride);
}

#else

inline bool request_tiles() { return false; }

struct Tiles {};

template <int PARTS>
class TilesOfParts {
 public:
  TilesOfParts() {}
};

#endif

}  // namespace inflight
