// Fewer than sixteen elements, where no instructions load and store some lanes of a vector.
#pragma once

#include <cstring>

namespace inflight {

/// The first `count`, zeros after them.
template <class Format>
inline Floats load(const Format* from, int64_t count) {
  if (count >= 16) return load(from);
  Format some[16] = {};
  if (count > 0) std::memcpy(some, from, count * sizeof(Format));
  return load(some);
}
template <class Format>
inline void store(Format* to, Floats x, int64_t count) {
  if (count >= 16) return store(to, x);
  Format some[16];
  store(some, x);
  if (count > 0) std::memcpy(to, some, count * sizeof(Format));
}

}  // namespace inflight
