// Sums and gathers over the ranks of one machine, through one piece of memory that all of them have mapped.
//
//     bytes 0            64           128                4096
//           | Flag of 0  | Flag of 1  | ...  (padding)   | rank 0 even | rank 0 odd | rank 1 even | rank 1 odd | ...
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
// A rank that is gone leaves the others asleep: whoever started the ranks ends them.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>

namespace inflight {

constexpr int64_t CHUNK = 256 * 1024;
constexpr int64_t PAGE = 4096;
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

/// The bits of a bfloat16.
struct BFloat {
  uint16_t bits;
};

inline float widen(float value) { return value; }
inline float widen(BFloat value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void narrow(float value, float* out) { *out = value; }
/// To nearest, ties to even, as torch rounds.
inline void narrow(float value, BFloat* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out->bits = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

/// One rank's view of the segment; its calls are collective: every rank makes them in the same order.
class RankSegment {
 public:
  RankSegment(char* start, int64_t rank, int64_t size) : start_(start), rank_(rank), size_(size) {}

  static int64_t num_bytes(int64_t size) { return flag_bytes(size) + 2 * size * CHUNK; }

  /// Every rank's `x`, added up in rank order in float32 and rounded once; the same bits on all ranks.
  template <typename Element>
  void sum(Element* x, int64_t count) const {
    constexpr int64_t step = CHUNK / sizeof(Element);
    for (int64_t start = 0; start < count; start += step) {
      const int64_t length = std::min(step, count - start);
      Element* piece = x + start;
      exchange(reinterpret_cast<const char*>(piece), length * sizeof(Element), [&](const auto& part_of) {
        for (int64_t begin = 0; begin < length; begin += BLOCK)
          sum_block(part_of, begin, std::min(BLOCK, length - begin), piece + begin);
      });
    }
  }

  /// Rows of all ranks side by side: `part` (num_rows, row_bytes) to `out` (num_rows, size, row_bytes).
  void gather(const char* part, int64_t num_rows, int64_t row_bytes, char* out) const {
    const int64_t num_bytes = num_rows * row_bytes;
    for (int64_t start = 0; start < num_bytes; start += CHUNK) {
      const int64_t end = std::min(start + CHUNK, num_bytes);
      exchange(part + start, end - start, [&](const auto& part_of) {
        for (int64_t at = start, next; at < end; at = next) {
          const int64_t row = at / row_bytes, column = at % row_bytes;
          next = std::min((row + 1) * row_bytes, end);
          for (int64_t other = 0; other < size_; ++other)
            std::memcpy(out + (row * size_ + other) * row_bytes + column, part_of(other) + at - start, next - at);
        }
      });
    }
  }

 private:
  char* const start_;
  const int64_t rank_, size_;

  static int64_t flag_bytes(int64_t size) { return (size * sizeof(Flag) + PAGE - 1) / PAGE * PAGE; }

  Flag& flag(int64_t of) const { return reinterpret_cast<Flag*>(start_)[of]; }

  /// One round. `read(part_of)` reads everybody's part at `part_of(rank)`.
  template <typename Read>
  void exchange(const char* part, int64_t num_bytes, Read&& read) const {
    const uint32_t round = flag(rank_).posted.load(std::memory_order_relaxed);
    const auto part_of = [&](int64_t other) { return start_ + flag_bytes(size_) + (2 * other + round % 2) * CHUNK; };
    std::memcpy(part_of(rank_), part, num_bytes);
    flag(rank_).post();
    for (int64_t other = 0; other < size_; ++other) flag(other).await(round + 1);
    read(part_of);
  }

  template <typename Element, typename PartOf>
  void sum_block(const PartOf& part_of, int64_t begin, int64_t length, Element* out) const {
    float sums[BLOCK];
    std::fill_n(sums, length, -0.0f);  // which leaves whatever is added as it is; 0 would not leave -0
    for (int64_t other = 0; other < size_; ++other) {
      const Element* part = reinterpret_cast<const Element*>(part_of(other)) + begin;
      for (int64_t i = 0; i < length; ++i) sums[i] += widen(part[i]);
    }
    for (int64_t i = 0; i < length; ++i) narrow(sums[i], &out[i]);
  }
};

}  // namespace inflight
