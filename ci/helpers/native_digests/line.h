// A line of what is printed.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>

#include "numbers.h"

namespace inflight {

/// FNV-1a, of the name and what was added; printed at its end.
class Line {
 public:
  template <class... Words>
  explicit Line(const char* format, Words... words) {
    std::snprintf(name_, sizeof name_, format, words...);
  }
  ~Line() { std::printf("%s: %016llx\n", name_, static_cast<unsigned long long>(digest_)); }
  Line(const Line&) = delete;

  void add_bytes(const void* from, size_t count) {
    for (size_t i = 0; i < count; ++i) digest_ = (digest_ ^ static_cast<const unsigned char*>(from)[i]) * 0x100000001b3;
  }
  void add(float value) {
    const float counted = std::isnan(value) ? from_bits(0x7fc00000) : value;
    add_bytes(&counted, sizeof counted);
  }
  void add(Floats x) {
    float values[16];
    store(values, x);
    for (float value : values) add(value);
  }
  void add(const Element* elements, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) add(load(elements + i, count - i));
  }
  /// Of a buffer whose columns are floats.
  void add_floats(const void* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      float value;
      std::memcpy(&value, static_cast<const char*>(from) + i * sizeof value, sizeof value);
      add(value);
    }
  }

 private:
  char name_[96];
  uint64_t digest_ = 0xcbf29ce484222325;
};

}  // namespace inflight
