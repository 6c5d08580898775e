// What all aarch64 processors have.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "../formats.h"

namespace inflight {

/// Denormals are 0 for this thread while it lives. Conversions from and to float16 keep those of float16, as on x86-64:
/// FZ16 is for arithmetic in that type, of which there is none.
///
/// One result differs from x86-64's, which flushes what is denormal after it was rounded: here it is flushed before, so
/// that what lies 2 ** -151 or less below 2 ** -126 becomes 0 instead of 2 ** -126.
class FlushedDenormals {
 public:
  FlushedDenormals() : before_(__builtin_aarch64_get_fpcr()) { __builtin_aarch64_set_fpcr(before_ | FZ); }
  ~FlushedDenormals() { __builtin_aarch64_set_fpcr(before_); }
  FlushedDenormals(const FlushedDenormals&) = delete;

 private:
  static constexpr unsigned FZ = 1u << 24;
  unsigned before_;
};

/// Ask for `count` lines of 64 bytes.
inline void prefetch_lines(const char* from, int count) {
  for (int line = 0; line < count; ++line) __builtin_prefetch(from + 64 * line);
}

inline float widen(F16 value) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(value.bits))), 0); }
inline void narrow(float value, F16* out) {
  out->bits = vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(value))), 0);
}

}  // namespace inflight
