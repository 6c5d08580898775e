// The operations that a program consists of, and the batch that they compute. operations.py has the same structures,
// field by field.
//
// A program has buffers of one row for each token of a step. A value is a range of a buffer's columns. All numbers are
// bfloat16, unless a field says otherwise.
#pragma once

#include "products.h"
#include "rank_segment.h"

namespace inflight {

/// Columns of a buffer, from `column` on; how many there are is known from the operation.
struct Value {
  int64_t buffer, column;
};

/// The first field of every operation. operations.py numbers them in the same order.
enum class Kind : int64_t {
  EMBEDDING,
  SUM,
  GATHER,
  LORA,
  LINEAR,
  GATED_LINEAR,
  RMS_NORM,
  NORM_OF_SUM,
  ROPE_AND_KV_WRITE,
  DECODE_ATTENTION,
  PREFILL_ATTENTION,
};

/// One layer's KV cache: two tensors (blocks, block_size, num_kv_heads, head_dim).
struct Cache {
  Element *keys, *values;
  int64_t block_size, num_kv_heads, head_dim;

  /// Offset of a head's key or value in a slot.
  int64_t offset(int64_t slot, int64_t kv_head) const { return (slot * num_kv_heads + kv_head) * head_dim; }
  /// The same for the token at `position` of the sequence with these blocks.
  int64_t offset(const int32_t* blocks, int64_t position, int64_t kv_head) const {
    return offset(blocks[position / block_size] * block_size + position % block_size, kv_head);
  }
};

/// out = table[token id], or a row that the batch gives. Of several ranks each holds a part of the table, and gives
/// zeros for the tokens of other parts; the part that begins with token 0 has the rows that the batch gives.
struct Embedding {
  Kind kind;
  Value out;
  /// (num_rows, size), not packed; its first row is that of token `first`.
  const Element* table;
  int64_t first, num_rows, size;
};

/// x becomes the sum of every rank's, which is rounded once.
struct Sum {
  Kind kind;
  /// All `size` columns of its buffer.
  Value x;
  int64_t size;
};

/// out = every rank's x side by side, in rank order.
struct Gather {
  Kind kind;
  /// All `size` columns of its buffer, and all of as many for each rank.
  Value x, out;
  int64_t size;
};

/// delta = scale * B (A x) of each token's low-rank adapter: what the next linear layer adds to its product. Tokens
/// without an adapter are left out, and a batch without any is not looked at.
struct Lora {
  Kind kind;
  /// `narrow`, of num_slices * max_rank columns, takes A x.
  Value x, narrow, delta;
  /// (slots, num_slices * max_rank, num_inputs) and (slots, max_rank, sum of the widths), not packed.
  const Element *a, *b;
  /// (slots): a factor; the leading ranks that are not zeros.
  const float* scales;
  const int32_t* ranks;
  int64_t num_inputs, max_rank, num_slices;
  /// Outputs of each of up to three layers with the same input.
  int64_t widths[3];

  int64_t num_outputs() const { return widths[0] + widths[1] + widths[2]; }
};

/// out = x @ weight.T + bias, plus delta where a token has an adapter.
struct Linear {
  Kind kind;
  Value x, out;
  /// Columns that `Lora` has written; buffer -1: none.
  Value delta;
  /// (num_outputs, num_inputs) as `pack_weight` lays it out; num_inputs is a multiple of 32.
  const Element* weight;
  /// (num_outputs), or null.
  const Element* bias;
  int64_t num_inputs, num_outputs;
};

/// out = silu(gate) * up of a linear layer whose outputs are gate and up, `num_outputs` of each, a multiple of 16.
struct GatedLinear {
  Kind kind;
  Value x, out;
  /// As of Linear: all of gate before all of up, `num_deltas` of each.
  Value delta;
  /// Panels of 16 rows of gate and 16 rows of up.
  const Element* weight;
  /// All of gate before all of up, or null.
  const Element* bias;
  int64_t num_inputs, num_outputs, num_deltas;
};

/// sum = x + residual; out = norm(sum) * weight. Without a residual (buffer -1): out = norm(x) * weight.
///
/// NORM_OF_SUM, with a residual, begins with the sum of every rank's x, which each has in its own area, rounded once.
/// Of many rows each rank computes some (`Run::splits_rows`): it writes these rows of `out`, which lies in the common
/// area, and of `sum`, which only the next NORM_OF_SUM reads, as its residual.
struct RmsNorm {
  Kind kind;
  Value x, residual, out, sum;
  const Element* weight;
  /// A multiple of 16.
  int64_t size;
  float eps;
};

/// Rotates the queries in place and the keys into the cache; copies the values there.
struct RopeAndKvWrite {
  Kind kind;
  Value queries, keys, values;
  Cache cache;
  int64_t num_heads;
  /// float32 (positions, rotary_dim): cosines, then sines.
  const float* cos_sin;
  /// Leading elements of a head that are rotated.
  int64_t rotary_dim;
  /// (head_dim), or null for both.
  const Element *query_norm, *key_norm;
  float norm_eps;
};

/// Attention of the decoding rows, or of the prefilling ones, over the cache.
struct Attention {
  Kind kind;
  Value queries, out;
  Cache cache;
  int64_t num_heads;
  /// Last keys that a token sees, itself included; 0 = all.
  int64_t sliding_window;
  float scale;

  int64_t queries_per_key() const { return num_heads / cache.num_kv_heads; }
  /// Where the keys begin that a query sees which sees keys up to `end`; may be negative.
  int64_t begin_of(int64_t end) const { return end - (sliding_window ? sliding_window : INT32_MAX); }
};

/// Tokens of a step: one of each decoding row, then the chunks of the prefilling rows.
struct Batch {
  int64_t num_tokens, num_decodes, num_prefills;
  /// (num_tokens) each: token id; position in the sequence; cache slot, negative = not stored.
  const int64_t *token_ids, *positions, *slots;
  /// (any number of rows, table_width): ids of each row's blocks.
  const int32_t* block_table;
  int64_t table_width;
  /// (num_decodes) each: row of the block table; tokens in the cache.
  const int64_t* decode_rows;
  const int32_t* decode_lens;
  /// (num_prefills) each, and (num_prefills + 1): where tokens start, counted from the first prefilling token.
  const int64_t* prefill_rows;
  const int32_t *prefill_lens, *prefill_starts;
  /// (num_tokens): row of `given_rows` that is a token's embedding, negative = the table's; null = all are the table's.
  const int64_t* given;
  const Element* given_rows;
  /// (num_tokens), slot of each token's adapter, negative = none; null where no token has one.
  const int32_t* adapters;

  const int32_t* blocks_of(int64_t table_row) const { return block_table + table_row * table_width; }
  bool has_adapter(int64_t token) const { return adapters && adapters[token] >= 0; }
};

/// The memory that ranks share (rank_segment.h), and which of them this is; null without other ranks.
struct Ranks {
  char* segment;
  int64_t rank, size;
};

/// Where a buffer is: in memory of this rank alone, in its area, or, of many rows, in the common one.
enum class Place : int64_t { PRIVATE, OWN_AREA, COMMON_AREA };

struct Program {
  int64_t num_operations, num_buffers;
  /// Each points to the first field of an operation.
  const Kind* const* operations;
  /// Columns of each buffer, and its place.
  const int64_t* widths;
  const Place* places;
  /// The buffer that holds the program's input at first, -1 if the token ids are its input; the buffer of its result.
  int64_t input, output;
  Instructions instructions;
  /// Elements of keys and values that prompts may have packed at the same time; a single chunk may have more.
  int64_t packed_at_once;
  Ranks ranks;
};

/// What the operations of one run share.
struct Run {
  const Program& program;
  const Batch& batch;
  /// Where each buffer starts. A buffer that products read has room for 32 rows more than there are tokens.
  Element* const* buffers;
  /// Memory for the results of decode attention's parts, and for packed keys and values of prefill attention.
  float* parts;
  Element* packed;
  RankSegment ranks;
  /// Whether ranks share the rows of a NORM_OF_SUM: few rows are added up by all before they would have met again.
  bool splits_rows;

  const Instructions& instructions() const { return program.instructions; }
  Element* at(const Value& value) const { return buffers[value.buffer] + value.column; }
  /// Elements between two rows of a value.
  int64_t stride(const Value& value) const { return program.widths[value.buffer]; }
};

}  // namespace inflight
