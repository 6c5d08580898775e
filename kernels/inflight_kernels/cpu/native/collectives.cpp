// What ranks of one machine do together, for Python. Called from collectives.py.
#include "rank_segment.h"

using namespace inflight;

#pragma GCC visibility push(default)
extern "C" {

/// Bytes of a segment for `size` ranks, zeros at first.
int64_t inflight_segment_bytes(int64_t size) { return RankSegment::num_bytes(size); }

/// x (count) becomes the sum of every rank's.
void inflight_sum_float32(char* segment, int64_t rank, int64_t size, float* x, int64_t count) {
  RankSegment(segment, rank, size).sum(x, count);
}

void inflight_sum_bfloat16(char* segment, int64_t rank, int64_t size, Bf16* x, int64_t count) {
  RankSegment(segment, rank, size).sum(x, count);
}

/// `part` (num_rows, row_bytes) of every rank side by side in `out` (num_rows, size, row_bytes).
void inflight_gather(char* segment, int64_t rank, int64_t size, const char* part, int64_t num_rows, int64_t row_bytes,
                     char* out) {
  RankSegment(segment, rank, size).gather(part, num_rows, row_bytes, out);
}
}
#pragma GCC visibility pop
