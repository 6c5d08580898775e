// Sums and gathers over the ranks of one machine, through one piece of memory that all of them have mapped.
//
//     bytes 0            64           128                4096
//           | Flag of 0  | Flag of 1  | ...  (padding)   | rank 0 even | rank 0 odd | rank 1 even | rank 1 odd | ...
//           | area of rank 0 | area of rank 1 | ...      | area of all |
//
// The segment starts as zeros. A rank alone writes its `posted` and its two buffers of CHUNK bytes; the others read
// them. Larger tensors go through it chunk by chunk; each chunk is a round. In round k = 0, 1, 2, ... every rank
//
//     1. copies its part into its buffer k % 2,
//     2. posts: its flag's `posted` goes from k to k + 1,
//     3. waits until everybody's `posted` is k + 1 or more,
//     4. reads all parts, in rank order.
//
// One meeting a round is enough. A rank that posts round k has read everything of round k - 1, and nobody gets past
// step 3 of round k before all have posted it: so when a rank overwrites buffer k % 2 in round k + 2, all have read it.
// `posted` is never more than one apart between ranks and wraps around at 2^32, which is even.
//
// Order of memory: `posted` is written with release (in fact sequentially consistent) and read with acquire, so whoever
// sees k + 1 sees the part. A rank that has looked for a while sleeps in a futex on the flag it waits for. Before, it
// counts itself into `sleepers` and then looks at `posted` again; the poster writes `posted` and then looks at
// `sleepers`. Both pairs are sequentially consistent: at least one side sees the other, and the kernel compares
// `posted` once more before it puts anybody to sleep. No wake is lost, and without sleepers none is called for.
//
// In the areas lie activations of programs (program.cpp), which need not be copied then: a rank writes to its own and
// to its rows of the common one, all ranks read them, and rounds without a chunk, `meet`, stand between. Areas are
// large, but only what is touched takes memory.
//
// A rank that is gone leaves the others asleep: whoever started the ranks ends them.
//
// All threads of a rank's team take part: each copies and reads its share of a chunk, and the first one posts and waits
// for the other ranks, between two barriers of the team. Outside of a parallel region a team is one thread.
#pragma once

#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>

#include "isa/processor.h"

namespace inflight {

constexpr int64_t CHUNK = 256 * 1024;
constexpr int64_t PAGE = 4096;
/// Bytes of an area.
constexpr int64_t AREA = 512 * 1024 * 1024;
/// Elements that are summed in float32 at a time.
constexpr int64_t BLOCK = 512;
/// How long a rank looks at a flag before it sleeps. It yields its core between two looks: where the system has put
/// both ranks on one core, a round then takes 10 us instead of 140, and on two cores no longer (AMD EPYC, 2026-11-22).
constexpr std::chrono::microseconds SPIN(50);

struct alignas(64) Flag {
  /// Rounds that the rank has put its part in for.
  std::atomic<uint32_t> posted;
  /// Ranks that sleep until it changes.
  std::atomic<uint32_t> sleepers;

  void post() {
    posted.fetch_add(1);
    if (sleepers.load()) futex(FUTEX_WAKE, INT_MAX);
  }

  /// Return once `posted` is `round` or more.
  void await(uint32_t round) {
    const auto deadline = std::chrono::steady_clock::now() + SPIN;
    do {
      if (reached(posted.load(std::memory_order_acquire), round)) return;
      sched_yield();
    } while (std::chrono::steady_clock::now() < deadline);
    sleepers.fetch_add(1);
    for (uint32_t seen; !reached(seen = posted.load(), round);) futex(FUTEX_WAIT, seen);
    sleepers.fetch_sub(1);
  }

 private:
  /// Whatever 2^32 did to them in between.
  static bool reached(uint32_t posted, uint32_t round) { return static_cast<int32_t>(posted - round) >= 0; }

  /// Between processes, so not a private one. A signal, or a flag that has changed, ends a wait early.
  void futex(int operation, uint32_t value) { syscall(SYS_futex, &posted, operation, value, nullptr, nullptr, 0); }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4, "a futex is 32 bits");

inline float widen(float value) { return value; }
inline float widen(Bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void narrow(float value, float* out) { *out = value; }
/// To nearest, ties to even, as torch rounds.
inline void narrow(float value, Bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out->bits = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

/// One rank's view of the segment; its calls are collective: every rank makes them in the same order. All threads of a
/// team make them, on data that all of them have finished writing, and go on when all have finished reading.
class RankSegment {
 public:
  RankSegment(char* start, int64_t rank, int64_t size) : start_(start), rank_(rank), size_(size) {}

  static int64_t num_bytes(int64_t size) { return area_start(size) + (size + 1) * AREA; }

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  char* own_area() const { return start_ + area_start(size_) + rank_ * AREA; }
  char* common_area() const { return start_ + area_start(size_) + size_ * AREA; }

  /// What lies in the area of `other` where `own` lies in this rank's.
  template <typename Element>
  const Element* of(int64_t other, const Element* own) const {
    return reinterpret_cast<const Element*>(reinterpret_cast<const char*>(own) + (other - rank_) * AREA);
  }

  /// Until all threads of all ranks have come here. The team has met since it wrote what others are to read.
  void meet() const {
    if (omp_get_thread_num() == 0) post_and_await();
    meet_team();
  }

  /// Every rank's `x`, added up in rank order in float32 and rounded once; the same bits on all ranks.
  template <typename Element>
  void sum(Element* x, int64_t count) const {
    constexpr int64_t step = CHUNK / sizeof(Element);
    for (int64_t start = 0; start < count; start += step) {
      Element* piece = x + start;
      exchange(piece, std::min(step, count - start), [&](const auto& part_of, int64_t first, int64_t end) {
        for (int64_t begin = first; begin < end; begin += BLOCK)
          sum_block(part_of, begin, std::min(BLOCK, end - begin), piece + begin);
      });
    }
    meet_team();
  }

  /// Rows of all ranks side by side: `part` (num_rows, row_bytes) to `out` (num_rows, size, row_bytes).
  void gather(const char* part, int64_t num_rows, int64_t row_bytes, char* out) const {
    const int64_t num_bytes = num_rows * row_bytes;
    for (int64_t start = 0; start < num_bytes; start += CHUNK) {
      exchange(part + start, std::min(CHUNK, num_bytes - start), [&](const auto& part_of, int64_t first, int64_t end) {
        for (int64_t at = first, next; at < end; at = next) {
          const int64_t row = (start + at) / row_bytes, column = (start + at) % row_bytes;
          next = std::min(at + row_bytes - column, end);
          for (int64_t other = 0; other < size_; ++other)
            std::memcpy(out + (row * size_ + other) * row_bytes + column, part_of(other) + at, next - at);
        }
      });
    }
    meet_team();
  }

 private:
  char* const start_;
  const int64_t rank_, size_;

  static int64_t flag_bytes(int64_t size) { return (size * sizeof(Flag) + PAGE - 1) / PAGE * PAGE; }
  static int64_t area_start(int64_t size) { return flag_bytes(size) + 2 * size * CHUNK; }

  Flag& flag(int64_t of) const { return reinterpret_cast<Flag*>(start_)[of]; }

  static void meet_team() {
#pragma omp barrier
  }

  void post_and_await() const {
    const uint32_t round = flag(rank_).posted.load(std::memory_order_relaxed);
    flag(rank_).post();
    for (int64_t other = 0; other < size_; ++other) flag(other).await(round + 1);
  }

  /// One round of `count` elements, a chunk at most. `read(part_of, first, end)` reads everybody's elements from
  /// `first` to `end` at `part_of(rank)`; it is called for the elements that this thread has copied.
  template <typename Element, typename Read>
  void exchange(const Element* part, int64_t count, Read&& read) const {
    const uint32_t round = flag(rank_).posted.load(std::memory_order_relaxed);
    const auto part_of = [&](int64_t other) {
      return reinterpret_cast<Element*>(start_ + flag_bytes(size_) + (2 * other + round % 2) * CHUNK);
    };
    // Whole blocks, so that no two threads write to one cache line.
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t num_blocks = (count + BLOCK - 1) / BLOCK;
    const int64_t first = std::min(num_blocks * thread / num_threads * BLOCK, count);
    const int64_t end = std::min(num_blocks * (thread + 1) / num_threads * BLOCK, count);
    std::memcpy(part_of(rank_) + first, part + first, (end - first) * sizeof(Element));
    meet_team();
    meet();
    read(part_of, first, end);
  }

  template <typename Element, typename PartOf>
  void sum_block(const PartOf& part_of, int64_t begin, int64_t length, Element* out) const {
    float sums[BLOCK];
    std::fill_n(sums, length, -0.0f);  // which leaves whatever is added as it is; 0 would not leave -0
    for (int64_t other = 0; other < size_; ++other) {
      const Element* part = part_of(other) + begin;
      for (int64_t i = 0; i < length; ++i) sums[i] += widen(part[i]);
    }
    for (int64_t i = 0; i < length; ++i) narrow(sums[i], &out[i]);
  }
};

}  // namespace inflight
