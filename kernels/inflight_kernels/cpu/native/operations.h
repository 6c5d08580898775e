// What operations ask of their fields (operation_fields.h), and what those of one run share.
//
// A program has buffers of one row for each token of a step. A value is a range of a buffer's columns. All numbers are
// of type Element, unless a field says otherwise.
#pragma once

#include "matrices.h"
#include "rank_segment.h"

namespace inflight {

/// Offset of a head's key or value in a slot.
inline int64_t offset_in(const Cache& cache, int64_t slot, int64_t kv_head) {
  return (slot * cache.num_kv_heads + kv_head) * cache.head_dim;
}

inline int64_t queries_per_key(const Attention& op) { return op.num_heads / op.cache.num_kv_heads; }

/// Where the keys begin that a query sees which sees keys up to `end`; may be negative.
inline int64_t begin_of(const Attention& op, int64_t end) {
  return end - (op.sliding_window ? op.sliding_window : INT32_MAX);
}

inline const int32_t* blocks_of(const Batch& batch, const Cache& cache, int64_t table_row) {
  const Blocks& blocks = batch.blocks[cache.group];
  return blocks.table + table_row * blocks.width;
}

/// Where a token's keys and values go; negative = nowhere.
inline int64_t slot_of(const Batch& batch, const Cache& cache, int64_t token) {
  return batch.blocks[cache.group].slots[token];
}

inline bool has_adapter(const Batch& batch, int64_t token) { return batch.adapters && batch.adapters[token] >= 0; }

/// What the operations of one run share.
struct Run {
  const Program& program;
  const Batch& batch;
  /// Where each buffer starts. A buffer that products read has room for 32 rows more than there are tokens.
  Element* const* buffers;
  /// Memory for the results of decode attention's parts, and for packed keys and values of prefill attention.
  float* parts;
  Element* packed;
  /// And for the choices of experts, and for rows that are quantised.
  char *choices, *integers;
  RankSegment ranks;
  /// Whether ranks share the rows of a NORM_OF_SUM: few rows are added up by all before they would have met again.
  bool splits_rows;

  const Instructions& instructions() const { return program.instructions; }
  Element* at(const Value& value) const { return buffers[value.buffer] + value.column; }
  /// Elements between two rows of a value.
  int64_t stride(const Value& value) const { return program.widths[value.buffer]; }
};

}  // namespace inflight
