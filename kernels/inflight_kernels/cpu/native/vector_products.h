// Products with a panel in vectors: by vdpbf16ps, or by float32 FMA over bfloat16 that is widened in registers.
//
// Both give the same bits. vdpbf16ps is two fused multiply-adds, the odd element of a pair before the even one, that
// round to nearest and take and give 0 for what is denormal; FMA does the same in that order while denormals are
// flushed. And a row's sums are added up in one order however many rows are multiplied with it.
//
// AMX adds up in another order, which FMA can follow too: of a single row, whose weights come from memory, tiles would
// multiply more slowly.
#pragma once

#include <cstring>

#include "panels.h"

namespace inflight {

/// Rows that are multiplied at once: the 24 sums of six leave registers for two lines of weights, widened, and an
/// element of x. Four, six and eight at once of 32 rows of 1,536 give 350, 424 and 359 GFLOP/s by vdpbf16ps, 211, 233
/// and 209 by FMA. But of 16 rows, whose weights come from memory, six at once take 1.03 to 1.06 of the time of four
/// (one core of Zen 5, 2026-11-22).
constexpr int64_t MAX_ROWS_IN_VECTORS = 6, MAX_OF_FEW_ROWS = 4, FEW_ROWS = 16;

/// Denormals are 0 for this thread while it lives, as they always are for vdpbf16ps and AMX.
class FlushedDenormals {
 public:
  FlushedDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO); }
  ~FlushedDenormals() { _mm_setcsr(before_); }
  FlushedDenormals(const FlushedDenormals&) = delete;

 private:
  static constexpr unsigned FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZERO = 0x0040;
  unsigned before_;
};

/// sum + x[0] * even elements + x[1] * odd elements of a line, for 16 columns.
inline Floats add_products(Floats sum, const Bf16* x, __m512i line) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)), reinterpret_cast<__m512bh>(line));
}

inline Floats add_products(Floats sum, const float* x, __m512i line) {
  const Floats even = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
  const Floats odd = _mm512_castsi512_ps(_mm512_and_si512(line, _mm512_set1_epi32(0xffff0000)));
  return _mm512_fmadd_ps(splat(x[0]), even, _mm512_fmadd_ps(splat(x[1]), odd, sum));
}

/// sums (ROWS, 32) = x @ panel, or sums += x @ panel, elements of x being broadcast over vectors: Bf16 for vdpbf16ps,
/// float for FMA. Strides in elements.
template <int ROWS, bool ADD, class Factor>
inline void product_of(const Factor* x, int64_t stride, const Element* panel, int64_t num_steps, float* sums,
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
      __m512i lines[2];
      for (int tile = 0; tile < 2; ++tile) {
        const char* line = step + tile * TILE_BYTES + 64 * r;
        _mm_prefetch(line + AHEAD_BYTES, _MM_HINT_T0);
        lines[tile] = _mm512_loadu_si512(line);
      }
      for (int row = 0; row < ROWS; ++row)
        for (int tile = 0; tile < 2; ++tile)
          kept[row][tile][r % 2] = add_products(kept[row][tile][r % 2], x + row * stride + 32 * i + 2 * r, lines[tile]);
    }
  }
  for (int row = 0; row < ROWS; ++row)
    for (int tile = 0; tile < 2; ++tile)
      _mm512_storeu_ps(sums + row * sums_stride + 16 * tile, _mm512_add_ps(kept[row][tile][0], kept[row][tile][1]));
}

/// The same for any number of rows.
template <bool ADD, class Factor>
inline void product_in_vectors(const Factor* x, int64_t stride, int64_t num_rows, const Element* panel, int64_t num_steps,
                               float* sums, int64_t sums_stride) {
  const int64_t most = num_rows <= FEW_ROWS ? MAX_OF_FEW_ROWS : MAX_ROWS_IN_VECTORS;
  for (int64_t row = 0, count; row < num_rows; row += count) {
    // As even as can be: the fewer rows, the more of the time goes to weights.
    count = ceil_div(num_rows - row, ceil_div(num_rows - row, most));
    const auto multiply_rows = count == 6   ? product_of<6, ADD, Factor>
                               : count == 5 ? product_of<5, ADD, Factor>
                               : count == 4 ? product_of<4, ADD, Factor>
                               : count == 3 ? product_of<3, ADD, Factor>
                               : count == 2 ? product_of<2, ADD, Factor>
                                            : product_of<1, ADD, Factor>;
    multiply_rows(x + row * stride, stride, panel, num_steps, sums + row * sums_stride, sums_stride);
  }
}

/// The sums that AMX gives, by float32 FMA: in each step the products of even and of odd elements are added up by
/// themselves, beginning with zero, and then both to the sum. (So Intel describes TDPBF16PS.)
template <bool ADD>
inline void product_as_in_tiles(const float* x, int64_t stride, int64_t num_rows, const Element* panel, int64_t num_steps,
                                float* sums, int64_t sums_stride) {
  const __m512i odd_half = _mm512_set1_epi32(0xffff0000);
  for (int64_t row = 0; row < num_rows; ++row, x += stride, sums += sums_stride) {
    Floats kept[2] = {splat(0.0f), splat(0.0f)};
    if (ADD)
      for (int tile = 0; tile < 2; ++tile) kept[tile] = _mm512_loadu_ps(sums + 16 * tile);
    const char* step = reinterpret_cast<const char*>(panel);
    for (int64_t i = 0; i < num_steps; ++i, step += STEP_BYTES) {
      Floats even[2] = {splat(0.0f), splat(0.0f)}, odd[2] = {splat(0.0f), splat(0.0f)};
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r)
        for (int tile = 0; tile < 2; ++tile) {
          const char* at = step + tile * TILE_BYTES + 64 * r;
          _mm_prefetch(at + AHEAD_BYTES, _MM_HINT_T0);
          const __m512i line = _mm512_loadu_si512(at);
          const float* pair = x + 32 * i + 2 * r;
          even[tile] = _mm512_fmadd_ps(splat(pair[0]), _mm512_castsi512_ps(_mm512_slli_epi32(line, 16)), even[tile]);
          odd[tile] = _mm512_fmadd_ps(splat(pair[1]), _mm512_castsi512_ps(_mm512_and_si512(line, odd_half)), odd[tile]);
        }
      for (int tile = 0; tile < 2; ++tile) kept[tile] = _mm512_add_ps(kept[tile], _mm512_add_ps(even[tile], odd[tile]));
    }
    for (int tile = 0; tile < 2; ++tile) _mm512_storeu_ps(sums + 16 * tile, kept[tile]);
  }
}

}  // namespace inflight
