// Memory that lasts from one product to the next: of a run, or of a thread.
#pragma once

#include <cstdint>
#include <vector>

#include "vectors.h"

namespace inflight {

/// Where pieces begin: at multiples of a page.
constexpr int64_t PIECE = 4096;

/// Memory cut into pieces. `start` may be null where only `num_bytes` matters.
struct Pieces {
  char* start;
  int64_t num_bytes = 0;

  template <class Element>
  Element* take(int64_t count) {
    char* taken = start ? start + num_bytes : nullptr;
    num_bytes += round_up(count * sizeof(Element), PIECE);
    return reinterpret_cast<Element*>(taken);
  }
};

/// Room that is this thread's own, from a cache line on, with what was written to it last. `Use` tells one room from
/// another.
template <class Use, class Number>
inline Number* own_room(int64_t count) {
  thread_local std::vector<Number> room;
  const int64_t more = 64 / sizeof(Number);
  if (count + more > static_cast<int64_t>(room.size())) room.resize(count + more);
  const auto address = reinterpret_cast<uintptr_t>(room.data());
  return reinterpret_cast<Number*>((address + 63) / 64 * 64);
}

}  // namespace inflight
