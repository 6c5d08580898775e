// What all x86-64 processors have.
#pragma once

#include <immintrin.h>

#include "../formats.h"

namespace inflight {

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

/// Ask for `count` cache lines.
inline void prefetch_lines(const char* from, int count) {
  for (int line = 0; line < count; ++line) _mm_prefetch(from + 64 * line, _MM_HINT_T0);
}

#ifdef __F16C__
inline float widen(F16 value) { return _cvtsh_ss(value.bits); }
inline void narrow(float value, F16* out) { out->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#endif

}  // namespace inflight
