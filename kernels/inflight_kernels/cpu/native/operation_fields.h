// Made from operations.py by `python -m inflight_kernels.cpu.operation_header`: what changes here changes there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace inflight {

/// What multiplies.
enum class Instruction : int64_t { VDPBF16PS, FMA, AMX, FMA_AS_AMX };

/// The first field of every operation.
enum class Kind : int64_t {
  EMBEDDING,
  SUM,
  GATHER,
  LORA,
  ADD_DELTA,
  LINEAR,
  GATED_LINEAR,
  HEAD_LINEAR,
  EXPERTS,
  ACTIVATE,
  ACTIVATE_AND_MUL,
  SCALE,
  PERMUTE,
  SOFT_CAP,
  ADD,
  MUL,
  SIGMOID_MUL,
  RMS_NORM,
  NORM_OF_SUM,
  ROW_SQUARES,
  RMS_NORM_OF_PART,
  LAYER_NORM,
  ROPE_AND_KV_WRITE,
  ROPE,
  ROPE_AND_LATENT_WRITE,
  DECODE_ATTENTION,
  PREFILL_ATTENTION,
  BIDIRECTIONAL_ATTENTION,
  CAUSAL_CONV,
  GATED_DELTA_RULE,
  GATED_RMS_NORM,
  STATE_SPACE_SCAN,
};

/// Where a buffer is: in memory of this rank alone, in its area, or, of many rows, in the common one.
enum class Place : int64_t { PRIVATE, OWN_AREA, COMMON_AREA };

/// Which number of a token names its row of a table: itself, its position, or its type. Where the batch gives a row for
/// a token, TOKEN is that row, and TOKEN_ALONE is not.
enum class Ids : int64_t { TOKEN, POSITION, TOKEN_ALONE, TYPE };

/// f of a gated layer, which computes f(gate) * up, or of one without a gate, which computes f(x).
///
/// Results are rounded to the dtype of x, and so is f(gate) before it is multiplied.
enum class Activation : int64_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, CLAMPED_SWIGLU };

/// Create a collection of name/value pairs.
///
/// Example enumeration:
///
/// >>> class Color(Enum): ...     RED = 1 ...     BLUE = 2 ...     GREEN = 3
///
/// Access them by:
///
/// - attribute access::
///
/// >>> Color.RED <Color.RED: 1>
///
/// - value lookup:
///
/// >>> Color(1) <Color.RED: 1>
///
/// - name lookup:
///
/// >>> Color['RED'] <Color.RED: 1>
///
/// Enumerations can be iterated over, and know how many members they have:
///
/// >>> len(Color) 3
///
/// >>> list(Color) [<Color.RED: 1>, <Color.BLUE: 2>, <Color.GREEN: 3>]
///
/// Methods can be added to enumerations, and members can have their own attributes -- see the documentation for
/// details.
enum class Gate : int64_t { SILU, SIGMOID };

/// Of stored keys and values: of the program's element type, fp8 (native/formats.h) or whole numbers of 8 bits.
enum class CacheFormat : int64_t { ELEMENT, FP8, INT8 };

/// Of a matrix's weights: of the program's element type, or codes of 8 or 4 bits (native/codes.h).
enum class WeightFormat : int64_t { PLAIN, INT8, FP8, INT4, FP4, NF4 };

/// Of the inputs that codes are multiplied with: elements, or quantised to 8 bits (native/integer_products.h).
enum class InputFormat : int64_t { KEPT, INT8 };

/// Of what groups of codes share.
enum class SharedFormat : int64_t { F32, F16, BF16, INT8 };

/// What a router makes of its logits, in float32.
enum class Scores : int64_t { SOFTMAX, SIGMOID };

/// What groups of experts are compared by: their highest score, or the sum of their two highest.
enum class GroupScore : int64_t { MAX, TOP2_SUM };

/// Inputs of a group of codes, at most.
constexpr int64_t MAX_GROUP_SIZE = 512;

/// The instruction for each class of products. Few rows wait for memory, which is read once for all of them; more read
/// weights from the second cache.
struct Instructions {
  Instruction one_row, few_rows, many_rows;
};

/// Columns of a buffer, from `column` on; how many there are is known from the operation.
struct Value {
  int64_t buffer, column;
};

/// Weights (outputs, inputs), packed as panels of 32 outputs, or several such matrices one after the other. Of codes
/// each group of inputs has a scale, and maybe a zero, for each output: a weight is scale * (code - zero).
struct Matrix {
  const void* values;
  /// (panels, num_groups, 32); of plain weights null, and so are zeros.
  const void* scales;
  /// (panels, num_groups, 32); null where all are 0.
  const void* zeros;
  WeightFormat format;
  InputFormat inputs;
  SharedFormat scale_format, zero_format;
  /// A multiple of 32.
  int64_t num_inputs;
  /// Inputs of a group, 16 or a multiple of 32; the last one may have fewer.
  int64_t num_groups, group_size;
};

/// One layer's KV cache: two tensors (blocks, block_size, num_kv_heads, head_dim), or one of keys whose first elements
/// are the values, so that `values` is where the keys are. Fp8 holds keys / key_scale and values / value_scale, divided
/// when they have been rounded to elements, clamped to +-448 and rounded to nearest, ties to even. It is read without
/// another rounding: elements have every number of fp8, and the scales multiply scores and the result of attention, in
/// float32. No number stays none. Each head of a token in INT8 has a scale of its own (native/quantize.h), and what is
/// read is rounded to elements.
struct Cache {
  void *keys, *values;
  CacheFormat format;
  int64_t block_size, num_kv_heads, head_dim;
  /// Elements of a value: head_dim, or fewer where they are those of the keys.
  int64_t value_dim;
  /// Of fp8; else 1.
  float key_scale, value_scale;
  /// (blocks, block_size, num_kv_heads), of INT8; else null.
  float *key_scales, *value_scales;
  /// Which of the step's Blocks say where its tokens are.
  int64_t group;
};

/// What a norm multiplies with, as many as it has columns: elements, before which the normalised values are rounded, or
/// float32 (then only the product is rounded), or, both null, nothing.
struct NormWeight {
  const Element* elements;
  const float* floats;
};

/// out = table[id] * factor; of token ids, or a row that the batch gives, as it is. Of several ranks each holds a part
/// of the table, and gives zeros for the ids of other parts; the part that begins with id 0 has the rows that the batch
/// gives.
struct Embedding {
  Kind kind;
  Value out;
  /// (num_rows, size), not packed; its first row is that of id `first`.
  const Element* table;
  /// What stands in its place where that is null: (num_rows, size), packed.
  Matrix codes;
  int64_t first, num_rows, size;
  Ids ids;
  float factor;
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

/// delta = scale * B (A x) of each token's low-rank adapter: what a linear layer adds to its product. Tokens without an
/// adapter are left out, and a batch without any is not looked at.
struct Lora {
  Kind kind;
  /// `narrow`, of num_slices * max_rank columns, takes A x.
  Value x, narrow, delta;
  /// (slots, num_slices * max_rank, num_inputs) and (slots, max_rank, sum of the widths), not packed.
  const Element *a, *b;
  /// (slots): a factor.
  const float* scales;
  /// (slots): the leading ranks that are not zeros.
  const int32_t* ranks;
  int64_t num_inputs, max_rank, num_slices;
  /// Outputs of each of the layers with the same input, then zeros.
  int64_t widths[3];
};

/// x += delta where a token has an adapter.
struct AddDelta {
  Kind kind;
  Value x;
  /// Columns that `Lora` has written.
  Value delta;
  int64_t size;
};

/// out = x @ weight.T + bias, plus delta where a token has an adapter.
struct Linear {
  Kind kind;
  Value x, out;
  /// Columns that `Lora` has written; buffer -1: none.
  Value delta;
  Matrix weight;
  /// (num_outputs), or null.
  const Element* bias;
  int64_t num_outputs;
};

/// out = f(gate) * up of a linear layer whose outputs are gate and up, `num_outputs` of each, a multiple of 16. Panels
/// of the weight have 16 rows of gate and 16 rows of up. The bias has all of gate before all of up, and so has delta,
/// `num_deltas` of each.
struct GatedLinear {
  Kind kind;
  Value x, out;
  /// Columns that `Lora` has written; buffer -1: none.
  Value delta;
  Matrix weight;
  /// (num_outputs), or null.
  const Element* bias;
  int64_t num_outputs;
  int64_t num_deltas;
  Activation activation;
};

/// out = x @ weight.T of each head by itself: its columns of x, and a matrix of its own.
struct HeadLinear {
  Kind kind;
  /// Columns of the first head.
  Value x, out;
  /// Those of all heads, one after the other.
  Matrix weight;
  int64_t num_heads;
  /// Of a head.
  int64_t num_outputs;
  /// Columns from one head to the next one.
  int64_t x_stride, out_stride;
};

/// out = the weighted sum of what the chosen experts of each token compute of x: down (f(gate) * up). moe/routing.py
/// says which are chosen, and what their weights are, or the batch does. What is chosen and not among this rank's own
/// adds nothing: the batch's count from the first of these on.
struct Experts {
  Kind kind;
  Value x;
  /// Buffer -1: the batch says what is chosen.
  Value logits;
  Value out;
  /// Of its own experts, each packed as the layers of a feed-forward, gated or not.
  Matrix gate_up, down;
  /// (num_own, size) and (num_own, num_inner): which column of x, and of what is activated, each input of an expert's
  /// gate_up and down is; or null: as they are.
  const int32_t *columns, *inner_columns;
  /// Whether gate_up is of both; else it is of up, and they compute down f(up).
  int64_t is_gated;
  /// (num_own, 2 * inner_size), of each all of gate before all of up; or null, as without gates.
  const Element* gate_up_bias;
  /// (num_own, size), or null.
  const Element* down_bias;
  Activation activation;
  int64_t num_experts, num_chosen;
  /// Those of which this rank has the weights.
  int64_t first_expert, num_own;
  Scores scores;
  GroupScore group_score;
  int64_t num_groups, num_chosen_groups;
  /// (num_experts), added to what is compared; or null.
  const float* choice_bias;
  /// Whether the weights of the chosen ones sum to `scale`.
  int64_t renormalizes;
  /// Added to the sum of sigmoids that they are divided by.
  float epsilon;
  /// Of the weights.
  float scale;
  /// (num_experts), of the weight of each, afterwards; or null.
  const float* factors;
  /// Of x and out; a multiple of 32.
  int64_t size;
  /// Outputs of up and zeros; a multiple of 32.
  int64_t inner_size;
  /// Outputs of up.
  int64_t num_inner;
};

/// out = f(x).
///
/// ACTIVATE_AND_MUL: out = f(gate) * up. x has all of gate before all of up, `size` of each.
struct Activate {
  Kind kind;
  Value x;
  /// Behind `size` columns it has zeros up to a multiple of 32.
  Value out;
  int64_t size;
  Activation activation;
};

/// out = x * factor.
struct Scale {
  Kind kind;
  Value x, out;
  int64_t size;
  float factor;
};

/// out = the columns of x in another order.
struct Permute {
  Kind kind;
  Value x;
  /// Behind `size` columns it has zeros up to a multiple of 32.
  Value out;
  /// (size): which column of x each of out is.
  const int32_t* columns;
  int64_t size;
};

/// out = cap * tanh(x / cap).
struct SoftCap {
  Kind kind;
  Value x, out;
  int64_t size;
  float cap;
};

/// out = x + y.
///
/// MUL: out = x * y.
struct Add {
  Kind kind;
  Value x, y, out;
  int64_t size;
};

/// out = x * sigmoid(gate).
struct SigmoidMul {
  Kind kind;
  Value x, gate, out;
  int64_t size;
  /// Of gate: 1, or as of x.
  int64_t gate_size;
};

/// sum = x + residual; out = norm(sum) * weight. Without a residual (buffer -1): out = norm(x) * weight, of each of
/// some groups of columns by itself.
///
/// NORM_OF_SUM: Has a residual, and begins with the sum of every rank's x, which each has in its own area, rounded
/// once. Of many rows each rank computes some (`Run::splits_rows`): it writes these rows of `out`, which lies in the
/// common area, and of `sum`, which only the next one reads, as its residual.
struct RmsNorm {
  Kind kind;
  Value x, residual, out, sum;
  /// Null for a sum without its norm.
  NormWeight weight;
  /// A multiple of 16.
  int64_t size;
  float eps;
  /// Of `size` columns each; 1 with a residual.
  int64_t num_groups;
};

/// out = the sum of the squares of x, or of x * silu(gate).
struct RowSquares {
  Kind kind;
  Value x;
  /// Buffer -1: none.
  Value gate;
  /// A float32, in the place of as many columns as it has the bytes of.
  Value out;
  /// Of x; a multiple of 16.
  int64_t size;
};

/// out = norm(x) * weight of some of the columns that are normalised together, with a gate behind the norm or before
/// it, as GatedRmsNorm has it, or without one. The parts' squares are added up in their order.
struct RmsNormOfPart {
  Kind kind;
  Value x;
  /// Buffer -1: none; else f is silu.
  Value gate;
  /// float32, as RowSquares writes them, of all ranks.
  Value squares;
  Value out;
  NormWeight weight;
  /// A multiple of 16.
  int64_t size;
  /// Which of `squares` are added up.
  int64_t first_part, part_step, num_parts;
  /// Of all parts.
  int64_t num_columns;
  int64_t gate_first;
  float eps;
};

/// sum = x + residual; out = norm(sum) * weight + bias. Without a residual (buffer -1): of x.
struct LayerNorm {
  Kind kind;
  Value x, residual, out, sum;
  /// (size) each; the bias may be null.
  const Element *weight, *bias;
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
  /// (positions, rotary_dim): cosines, then sines.
  const float* cos_sin;
  /// Leading elements of a head that are rotated.
  int64_t rotary_dim;
  /// Whether elements 2 i and 2 i + 1 are a pair; else i and i + rotary_dim / 2.
  int64_t adjacent_pairs;
  /// (head_dim), or null for both.
  NormWeight query_norm, key_norm;
  float norm_eps;
};

/// Rotates the queries in place.
struct Rope {
  Kind kind;
  Value queries;
  int64_t num_heads, head_dim;
  /// As of RopeAndKvWrite, as what follows.
  const float* cos_sin;
  int64_t rotary_dim, adjacent_pairs;
  /// (head_dim), or null.
  NormWeight query_norm;
  float norm_eps;
};

/// out = the rotated part of each head's query. Normalises a token's latent, rotates the key behind it, both in place,
/// and writes them, a key whose first elements are the value, to the cache.
struct RopeAndLatentWrite {
  Kind kind;
  Value queries, latent, out;
  int64_t num_heads;
  /// Columns from one head to the next one.
  int64_t query_stride, out_stride;
  Cache cache;
  /// (positions, elements that are rotated): cosines, then sines.
  const float* cos_sin;
  /// As of RopeAndKvWrite.
  int64_t adjacent_pairs;
  /// Of the latent, as many as a value has elements.
  NormWeight norm;
  float norm_eps;
};

/// Attention of some rows over the cache.
///
/// DECODE_ATTENTION: Of the decoding rows.
///
/// PREFILL_ATTENTION: Of the prefilling rows.
struct Attention {
  Kind kind;
  Value queries, out;
  Cache cache;
  int64_t num_heads;
  /// Last keys that a token sees, itself included; 0 = all.
  int64_t sliding_window;
  float scale;
  /// Each score becomes soft_cap * tanh(score / soft_cap); 0 = it stays.
  float soft_cap;
  /// (num_heads): one more logit of each head, without a key or value; null = none.
  const float* sinks;
};

/// Attention of the step's tokens to all of their own sequence, as they stand in the step.
struct BidirectionalAttention {
  Kind kind;
  Value queries, keys, values, out;
  int64_t num_heads, num_kv_heads, head_dim;
  /// Tokens before and behind it that a token sees; 0 = all.
  int64_t window;
  float scale;
  /// (num_heads, bias_size), added to scores, by the distance of a key from its query; the middle one is that of the
  /// query's own; null = none.
  const float* bias;
  int64_t bias_size;
};

/// out = f(bias + the sum over w of weight[w] * what x is `num_taps` - 1 - w tokens before) of each sequence's tokens;
/// x is zero before position 0.
struct CausalConv {
  Kind kind;
  Value x, out;
  /// (num_taps, size), that of the oldest input first.
  const float* weight;
  /// (size), or null.
  const float* bias;
  /// (slots, num_taps - 1, size): the last inputs, the oldest first.
  Element* state;
  int64_t size;
  /// 8 at most.
  int64_t num_taps;
  /// Whether f is `activation`; else it changes nothing.
  int64_t activates;
  Activation activation;
};

/// out = query S of each token and value head, where S is the head's state behind the token: what it was before decays,
/// then the key's part of it moves towards the value.
struct GatedDeltaRule {
  Kind kind;
  /// Queries, keys, values.
  Value qkv;
  Value a, b, out;
  /// (num_heads)
  const float* a_log;
  /// (num_heads * num_decays)
  const float* dt_bias;
  /// (slots, num_heads, key_dim, value_dim)
  float* state;
  int64_t num_key_heads, num_heads;
  /// A multiple of 16, 256 at most.
  int64_t key_dim;
  /// A multiple of 16.
  int64_t value_dim;
  /// Of a head: 1, or key_dim, of each row of its state.
  int64_t num_decays;
};

/// out = norm(x) * weight * f(gate) of each group of columns, or norm(x * f(gate)) * weight. Rounded before the weight
/// and behind it, if that has elements, and in the end.
struct GatedRmsNorm {
  Kind kind;
  Value x, gate, out;
  /// (weight_size)
  NormWeight weight;
  /// The latter is a multiple of 16.
  int64_t size, group_size;
  /// That of a group, which all have, or of all columns.
  int64_t weight_size;
  Gate activation;
  /// Whether it is before the norm.
  int64_t gate_first;
  float eps;
};

/// out = S c + d * x of each token and head, where S is the head's state behind the token: what it was before decays,
/// and the products of x and b are added for the token's part of time.
struct StateSpaceScan {
  Kind kind;
  Value x, b, c, dt, out;
  /// (num_heads) each.
  const float *a_log, *d, *dt_bias;
  /// (slots, num_heads, head_dim, state_dim)
  float* state;
  int64_t num_heads, num_groups;
  /// A multiple of 16.
  int64_t head_dim;
  /// A multiple of 16, 256 at most.
  int64_t state_dim;
  /// Of a token's part of time.
  float least, most;
};

/// Whose tokens a step has, as StepSequences says; none where no layer keeps a state for each.
struct Sequences {
  int64_t count;
  /// (count): where each one's state is.
  const int64_t* slots;
  /// (count + 1): where tokens start.
  const int32_t* starts;
  /// (num_tokens): a state before position 0 is zeros.
  const int64_t* positions;
  /// (num_tokens): another slot that takes the state behind a token too, negative = none; null = of no token.
  const int32_t* kept;
};

/// Where layers of one group keep what they keep of a step's tokens, see StepBlocks.
struct Blocks {
  /// (num_tokens): cache slot, negative = not stored.
  const int64_t* slots;
  /// (any number of rows, width): ids of each row's blocks.
  const int32_t* table;
  /// Elements between two rows of the table.
  int64_t width;
};

/// Tokens of a step: one of each decoding row, then the chunks of the prefilling rows.
struct Batch {
  int64_t num_tokens, num_decodes, num_prefills;
  /// (num_tokens) each: token id; position in the sequence.
  const int64_t *token_ids, *positions;
  /// Of each group of layers.
  const Blocks* blocks;
  /// (num_decodes): row of the block table.
  const int64_t* decode_rows;
  /// (num_decodes): tokens in the cache.
  const int32_t* decode_lens;
  /// (num_prefills): row of the block table.
  const int64_t* prefill_rows;
  /// (num_prefills): tokens in the cache.
  const int32_t* prefill_lens;
  /// (num_prefills + 1): where tokens start, counted from the first prefilling token.
  const int32_t* prefill_starts;
  /// (num_tokens): row of `given_rows` that is a token's embedding, negative = the table's; null = all are the table's.
  const int64_t* given;
  const Element* given_rows;
  /// (num_tokens): slot of each token's adapter, negative = none; null where no token has one.
  const int32_t* adapters;
  /// (num_tokens); null = all are 0.
  const int64_t* token_types;
  Sequences sequences;
  /// (num_tokens, num_chosen): of each token, where no router of the program chooses them; else null.
  const int32_t* experts;
  /// (num_tokens, num_chosen), theirs.
  const float* expert_weights;
};

/// The memory that ranks share (rank_segment.h), and which of them this is; null without other ranks.
struct Ranks {
  char* segment;
  int64_t rank, size;
};

/// Operations in order, over buffers.
struct Program {
  int64_t num_operations, num_buffers;
  /// (num_operations): each points to the first field of an operation.
  const Kind* const* operations;
  /// (num_buffers): columns of each.
  const int64_t* widths;
  /// (num_buffers): where each is.
  const Place* places;
  /// The buffer that holds the program's input at first, -1 if that is the token ids.
  int64_t input;
  /// The buffer of its result.
  int64_t output;
  Instructions instructions;
  /// Elements of keys and values that prompts may have packed at the same time; a single chunk may have more.
  int64_t packed_at_once;
  Ranks ranks;
};

/// Of every structure its size, then its fields' offsets: Python compares them with its own.
constexpr int64_t LAYOUT[] = {
    sizeof(Instructions),
    offsetof(Instructions, one_row),
    offsetof(Instructions, few_rows),
    offsetof(Instructions, many_rows),
    sizeof(Value),
    offsetof(Value, buffer),
    offsetof(Value, column),
    sizeof(Matrix),
    offsetof(Matrix, values),
    offsetof(Matrix, scales),
    offsetof(Matrix, zeros),
    offsetof(Matrix, format),
    offsetof(Matrix, inputs),
    offsetof(Matrix, scale_format),
    offsetof(Matrix, zero_format),
    offsetof(Matrix, num_inputs),
    offsetof(Matrix, num_groups),
    offsetof(Matrix, group_size),
    sizeof(Cache),
    offsetof(Cache, keys),
    offsetof(Cache, values),
    offsetof(Cache, format),
    offsetof(Cache, block_size),
    offsetof(Cache, num_kv_heads),
    offsetof(Cache, head_dim),
    offsetof(Cache, value_dim),
    offsetof(Cache, key_scale),
    offsetof(Cache, value_scale),
    offsetof(Cache, key_scales),
    offsetof(Cache, value_scales),
    offsetof(Cache, group),
    sizeof(NormWeight),
    offsetof(NormWeight, elements),
    offsetof(NormWeight, floats),
    sizeof(Embedding),
    offsetof(Embedding, kind),
    offsetof(Embedding, out),
    offsetof(Embedding, table),
    offsetof(Embedding, codes),
    offsetof(Embedding, first),
    offsetof(Embedding, num_rows),
    offsetof(Embedding, size),
    offsetof(Embedding, ids),
    offsetof(Embedding, factor),
    sizeof(Sum),
    offsetof(Sum, kind),
    offsetof(Sum, x),
    offsetof(Sum, size),
    sizeof(Gather),
    offsetof(Gather, kind),
    offsetof(Gather, x),
    offsetof(Gather, out),
    offsetof(Gather, size),
    sizeof(Lora),
    offsetof(Lora, kind),
    offsetof(Lora, x),
    offsetof(Lora, narrow),
    offsetof(Lora, delta),
    offsetof(Lora, a),
    offsetof(Lora, b),
    offsetof(Lora, scales),
    offsetof(Lora, ranks),
    offsetof(Lora, num_inputs),
    offsetof(Lora, max_rank),
    offsetof(Lora, num_slices),
    offsetof(Lora, widths),
    sizeof(AddDelta),
    offsetof(AddDelta, kind),
    offsetof(AddDelta, x),
    offsetof(AddDelta, delta),
    offsetof(AddDelta, size),
    sizeof(Linear),
    offsetof(Linear, kind),
    offsetof(Linear, x),
    offsetof(Linear, out),
    offsetof(Linear, delta),
    offsetof(Linear, weight),
    offsetof(Linear, bias),
    offsetof(Linear, num_outputs),
    sizeof(GatedLinear),
    offsetof(GatedLinear, kind),
    offsetof(GatedLinear, x),
    offsetof(GatedLinear, out),
    offsetof(GatedLinear, delta),
    offsetof(GatedLinear, weight),
    offsetof(GatedLinear, bias),
    offsetof(GatedLinear, num_outputs),
    offsetof(GatedLinear, num_deltas),
    offsetof(GatedLinear, activation),
    sizeof(HeadLinear),
    offsetof(HeadLinear, kind),
    offsetof(HeadLinear, x),
    offsetof(HeadLinear, out),
    offsetof(HeadLinear, weight),
    offsetof(HeadLinear, num_heads),
    offsetof(HeadLinear, num_outputs),
    offsetof(HeadLinear, x_stride),
    offsetof(HeadLinear, out_stride),
    sizeof(Experts),
    offsetof(Experts, kind),
    offsetof(Experts, x),
    offsetof(Experts, logits),
    offsetof(Experts, out),
    offsetof(Experts, gate_up),
    offsetof(Experts, down),
    offsetof(Experts, columns),
    offsetof(Experts, inner_columns),
    offsetof(Experts, is_gated),
    offsetof(Experts, gate_up_bias),
    offsetof(Experts, down_bias),
    offsetof(Experts, activation),
    offsetof(Experts, num_experts),
    offsetof(Experts, num_chosen),
    offsetof(Experts, first_expert),
    offsetof(Experts, num_own),
    offsetof(Experts, scores),
    offsetof(Experts, group_score),
    offsetof(Experts, num_groups),
    offsetof(Experts, num_chosen_groups),
    offsetof(Experts, choice_bias),
    offsetof(Experts, renormalizes),
    offsetof(Experts, epsilon),
    offsetof(Experts, scale),
    offsetof(Experts, factors),
    offsetof(Experts, size),
    offsetof(Experts, inner_size),
    offsetof(Experts, num_inner),
    sizeof(Activate),
    offsetof(Activate, kind),
    offsetof(Activate, x),
    offsetof(Activate, out),
    offsetof(Activate, size),
    offsetof(Activate, activation),
    sizeof(Scale),
    offsetof(Scale, kind),
    offsetof(Scale, x),
    offsetof(Scale, out),
    offsetof(Scale, size),
    offsetof(Scale, factor),
    sizeof(Permute),
    offsetof(Permute, kind),
    offsetof(Permute, x),
    offsetof(Permute, out),
    offsetof(Permute, columns),
    offsetof(Permute, size),
    sizeof(SoftCap),
    offsetof(SoftCap, kind),
    offsetof(SoftCap, x),
    offsetof(SoftCap, out),
    offsetof(SoftCap, size),
    offsetof(SoftCap, cap),
    sizeof(Add),
    offsetof(Add, kind),
    offsetof(Add, x),
    offsetof(Add, y),
    offsetof(Add, out),
    offsetof(Add, size),
    sizeof(SigmoidMul),
    offsetof(SigmoidMul, kind),
    offsetof(SigmoidMul, x),
    offsetof(SigmoidMul, gate),
    offsetof(SigmoidMul, out),
    offsetof(SigmoidMul, size),
    offsetof(SigmoidMul, gate_size),
    sizeof(RmsNorm),
    offsetof(RmsNorm, kind),
    offsetof(RmsNorm, x),
    offsetof(RmsNorm, residual),
    offsetof(RmsNorm, out),
    offsetof(RmsNorm, sum),
    offsetof(RmsNorm, weight),
    offsetof(RmsNorm, size),
    offsetof(RmsNorm, eps),
    offsetof(RmsNorm, num_groups),
    sizeof(RowSquares),
    offsetof(RowSquares, kind),
    offsetof(RowSquares, x),
    offsetof(RowSquares, gate),
    offsetof(RowSquares, out),
    offsetof(RowSquares, size),
    sizeof(RmsNormOfPart),
    offsetof(RmsNormOfPart, kind),
    offsetof(RmsNormOfPart, x),
    offsetof(RmsNormOfPart, gate),
    offsetof(RmsNormOfPart, squares),
    offsetof(RmsNormOfPart, out),
    offsetof(RmsNormOfPart, weight),
    offsetof(RmsNormOfPart, size),
    offsetof(RmsNormOfPart, first_part),
    offsetof(RmsNormOfPart, part_step),
    offsetof(RmsNormOfPart, num_parts),
    offsetof(RmsNormOfPart, num_columns),
    offsetof(RmsNormOfPart, gate_first),
    offsetof(RmsNormOfPart, eps),
    sizeof(LayerNorm),
    offsetof(LayerNorm, kind),
    offsetof(LayerNorm, x),
    offsetof(LayerNorm, residual),
    offsetof(LayerNorm, out),
    offsetof(LayerNorm, sum),
    offsetof(LayerNorm, weight),
    offsetof(LayerNorm, bias),
    offsetof(LayerNorm, size),
    offsetof(LayerNorm, eps),
    sizeof(RopeAndKvWrite),
    offsetof(RopeAndKvWrite, kind),
    offsetof(RopeAndKvWrite, queries),
    offsetof(RopeAndKvWrite, keys),
    offsetof(RopeAndKvWrite, values),
    offsetof(RopeAndKvWrite, cache),
    offsetof(RopeAndKvWrite, num_heads),
    offsetof(RopeAndKvWrite, cos_sin),
    offsetof(RopeAndKvWrite, rotary_dim),
    offsetof(RopeAndKvWrite, adjacent_pairs),
    offsetof(RopeAndKvWrite, query_norm),
    offsetof(RopeAndKvWrite, key_norm),
    offsetof(RopeAndKvWrite, norm_eps),
    sizeof(Rope),
    offsetof(Rope, kind),
    offsetof(Rope, queries),
    offsetof(Rope, num_heads),
    offsetof(Rope, head_dim),
    offsetof(Rope, cos_sin),
    offsetof(Rope, rotary_dim),
    offsetof(Rope, adjacent_pairs),
    offsetof(Rope, query_norm),
    offsetof(Rope, norm_eps),
    sizeof(RopeAndLatentWrite),
    offsetof(RopeAndLatentWrite, kind),
    offsetof(RopeAndLatentWrite, queries),
    offsetof(RopeAndLatentWrite, latent),
    offsetof(RopeAndLatentWrite, out),
    offsetof(RopeAndLatentWrite, num_heads),
    offsetof(RopeAndLatentWrite, query_stride),
    offsetof(RopeAndLatentWrite, out_stride),
    offsetof(RopeAndLatentWrite, cache),
    offsetof(RopeAndLatentWrite, cos_sin),
    offsetof(RopeAndLatentWrite, adjacent_pairs),
    offsetof(RopeAndLatentWrite, norm),
    offsetof(RopeAndLatentWrite, norm_eps),
    sizeof(Attention),
    offsetof(Attention, kind),
    offsetof(Attention, queries),
    offsetof(Attention, out),
    offsetof(Attention, cache),
    offsetof(Attention, num_heads),
    offsetof(Attention, sliding_window),
    offsetof(Attention, scale),
    offsetof(Attention, soft_cap),
    offsetof(Attention, sinks),
    sizeof(BidirectionalAttention),
    offsetof(BidirectionalAttention, kind),
    offsetof(BidirectionalAttention, queries),
    offsetof(BidirectionalAttention, keys),
    offsetof(BidirectionalAttention, values),
    offsetof(BidirectionalAttention, out),
    offsetof(BidirectionalAttention, num_heads),
    offsetof(BidirectionalAttention, num_kv_heads),
    offsetof(BidirectionalAttention, head_dim),
    offsetof(BidirectionalAttention, window),
    offsetof(BidirectionalAttention, scale),
    offsetof(BidirectionalAttention, bias),
    offsetof(BidirectionalAttention, bias_size),
    sizeof(CausalConv),
    offsetof(CausalConv, kind),
    offsetof(CausalConv, x),
    offsetof(CausalConv, out),
    offsetof(CausalConv, weight),
    offsetof(CausalConv, bias),
    offsetof(CausalConv, state),
    offsetof(CausalConv, size),
    offsetof(CausalConv, num_taps),
    offsetof(CausalConv, activates),
    offsetof(CausalConv, activation),
    sizeof(GatedDeltaRule),
    offsetof(GatedDeltaRule, kind),
    offsetof(GatedDeltaRule, qkv),
    offsetof(GatedDeltaRule, a),
    offsetof(GatedDeltaRule, b),
    offsetof(GatedDeltaRule, out),
    offsetof(GatedDeltaRule, a_log),
    offsetof(GatedDeltaRule, dt_bias),
    offsetof(GatedDeltaRule, state),
    offsetof(GatedDeltaRule, num_key_heads),
    offsetof(GatedDeltaRule, num_heads),
    offsetof(GatedDeltaRule, key_dim),
    offsetof(GatedDeltaRule, value_dim),
    offsetof(GatedDeltaRule, num_decays),
    sizeof(GatedRmsNorm),
    offsetof(GatedRmsNorm, kind),
    offsetof(GatedRmsNorm, x),
    offsetof(GatedRmsNorm, gate),
    offsetof(GatedRmsNorm, out),
    offsetof(GatedRmsNorm, weight),
    offsetof(GatedRmsNorm, size),
    offsetof(GatedRmsNorm, group_size),
    offsetof(GatedRmsNorm, weight_size),
    offsetof(GatedRmsNorm, activation),
    offsetof(GatedRmsNorm, gate_first),
    offsetof(GatedRmsNorm, eps),
    sizeof(StateSpaceScan),
    offsetof(StateSpaceScan, kind),
    offsetof(StateSpaceScan, x),
    offsetof(StateSpaceScan, b),
    offsetof(StateSpaceScan, c),
    offsetof(StateSpaceScan, dt),
    offsetof(StateSpaceScan, out),
    offsetof(StateSpaceScan, a_log),
    offsetof(StateSpaceScan, d),
    offsetof(StateSpaceScan, dt_bias),
    offsetof(StateSpaceScan, state),
    offsetof(StateSpaceScan, num_heads),
    offsetof(StateSpaceScan, num_groups),
    offsetof(StateSpaceScan, head_dim),
    offsetof(StateSpaceScan, state_dim),
    offsetof(StateSpaceScan, least),
    offsetof(StateSpaceScan, most),
    sizeof(Sequences),
    offsetof(Sequences, count),
    offsetof(Sequences, slots),
    offsetof(Sequences, starts),
    offsetof(Sequences, positions),
    offsetof(Sequences, kept),
    sizeof(Blocks),
    offsetof(Blocks, slots),
    offsetof(Blocks, table),
    offsetof(Blocks, width),
    sizeof(Batch),
    offsetof(Batch, num_tokens),
    offsetof(Batch, num_decodes),
    offsetof(Batch, num_prefills),
    offsetof(Batch, token_ids),
    offsetof(Batch, positions),
    offsetof(Batch, blocks),
    offsetof(Batch, decode_rows),
    offsetof(Batch, decode_lens),
    offsetof(Batch, prefill_rows),
    offsetof(Batch, prefill_lens),
    offsetof(Batch, prefill_starts),
    offsetof(Batch, given),
    offsetof(Batch, given_rows),
    offsetof(Batch, adapters),
    offsetof(Batch, token_types),
    offsetof(Batch, sequences),
    offsetof(Batch, experts),
    offsetof(Batch, expert_weights),
    sizeof(Ranks),
    offsetof(Ranks, segment),
    offsetof(Ranks, rank),
    offsetof(Ranks, size),
    sizeof(Program),
    offsetof(Program, num_operations),
    offsetof(Program, num_buffers),
    offsetof(Program, operations),
    offsetof(Program, widths),
    offsetof(Program, places),
    offsetof(Program, input),
    offsetof(Program, output),
    offsetof(Program, instructions),
    offsetof(Program, packed_at_once),
    offsetof(Program, ranks),
};

}  // namespace inflight
