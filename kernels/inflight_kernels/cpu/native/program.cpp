// Runs a program of operations on a CPU: weights and activations of one format, sums in float32. Called from
// program.py.
//
// One parallel region for the whole program: every thread walks through all operations, and in each takes work items
// until none is left. Results are rounded as by the torch reference: once after each operation.
#include <omp.h>

#include <iterator>

#include "bidirectional_attention.h"
#include "causal_conv.h"
#include "decode_attention.h"
#include "experts.h"
#include "gated_delta_rule.h"
#include "gated_norm.h"
#include "lora.h"
#include "part_norm.h"
#include "pointwise.h"
#include "prefill_attention.h"
#include "state_space_scan.h"

namespace inflight {
namespace {

template <class Op>
const Op& as(const Kind* operation) {
  return *reinterpret_cast<const Op*>(operation);
}

void run(const Kind* operation, const Run& step) {
  switch (*operation) {
    case Kind::EMBEDDING:
      return run(as<Embedding>(operation), step);
    case Kind::SUM:
      return run(as<Sum>(operation), step);
    case Kind::GATHER:
      return run(as<Gather>(operation), step);
    case Kind::LORA:
      return run(as<Lora>(operation), step);
    case Kind::ADD_DELTA:
      return run(as<AddDelta>(operation), step);
    case Kind::LINEAR:
      return run(as<Linear>(operation), step);
    case Kind::GATED_LINEAR:
      return run(as<GatedLinear>(operation), step);
    case Kind::HEAD_LINEAR:
      return run(as<HeadLinear>(operation), step);
    case Kind::EXPERTS:
      return run(as<Experts>(operation), step);
    case Kind::ACTIVATE:
      return run(as<Activate>(operation), step);
    case Kind::ACTIVATE_AND_MUL:
      return run_activate_and_mul(as<Activate>(operation), step);
    case Kind::SCALE:
      return run(as<Scale>(operation), step);
    case Kind::PERMUTE:
      return run(as<Permute>(operation), step);
    case Kind::SOFT_CAP:
      return run(as<SoftCap>(operation), step);
    case Kind::ADD:
      return run_add(as<Add>(operation), step);
    case Kind::MUL:
      return run_mul(as<Add>(operation), step);
    case Kind::SIGMOID_MUL:
      return run(as<SigmoidMul>(operation), step);
    case Kind::RMS_NORM:
      return run(as<RmsNorm>(operation), step);
    case Kind::NORM_OF_SUM:
      return run_norm_of_sum(as<RmsNorm>(operation), step);
    case Kind::ROW_SQUARES:
      return run(as<RowSquares>(operation), step);
    case Kind::RMS_NORM_OF_PART:
      return run(as<RmsNormOfPart>(operation), step);
    case Kind::LAYER_NORM:
      return run(as<LayerNorm>(operation), step);
    case Kind::ROPE_AND_KV_WRITE:
      return run(as<RopeAndKvWrite>(operation), step);
    case Kind::ROPE:
      return run(as<Rope>(operation), step);
    case Kind::ROPE_AND_LATENT_WRITE:
      return run(as<RopeAndLatentWrite>(operation), step);
    case Kind::DECODE_ATTENTION:
      if (step.batch.num_decodes) run_decode(as<Attention>(operation), step);
      return;
    case Kind::PREFILL_ATTENTION:
      if (step.batch.num_prefills) run_prefill(as<Attention>(operation), step);
      return;
    case Kind::BIDIRECTIONAL_ATTENTION:
      return run(as<BidirectionalAttention>(operation), step);
    case Kind::CAUSAL_CONV:
      return run(as<CausalConv>(operation), step);
    case Kind::GATED_DELTA_RULE:
      return run(as<GatedDeltaRule>(operation), step);
    case Kind::GATED_RMS_NORM:
      return run(as<GatedRmsNorm>(operation), step);
    case Kind::STATE_SPACE_SCAN:
      return run(as<StateSpaceScan>(operation), step);
  }
}

RankSegment open(const Ranks& ranks) { return RankSegment(ranks.segment, ranks.rank, ranks.size); }

/// Rows that one rank of several adds up before it would have met the others.
constexpr int64_t FEW_ROWS = 32;

bool splits_rows(const Program& program, const Batch& batch) {
  return program.ranks.segment && batch.num_tokens > FEW_ROWS;
}

/// Room for the rows that an operation quantises.
int64_t count_integer_bytes(const Kind* operation, int64_t num_tokens) {
  switch (*operation) {
    case Kind::LINEAR:
      return Operand::room_bytes(num_tokens, as<Linear>(operation).weight);
    case Kind::GATED_LINEAR:
      return Operand::room_bytes(num_tokens, as<GatedLinear>(operation).weight);
    case Kind::EXPERTS: {
      const auto& op = as<Experts>(operation);
      const int64_t num_choices = num_tokens * op.num_chosen;
      return std::max(Operand::room_bytes(num_choices, op.gate_up), Operand::room_bytes(num_choices, op.down));
    }
    default:
      return 0;
  }
}

/// Memory of one run: all buffers but that of the result, then what attention and experts need.
struct Workspace {
  std::vector<Element*> buffers;
  float* parts;
  Element* packed;
  char *choices, *integers;
  int64_t num_bytes;

  /// `start` may be null where only `num_bytes` matters.
  Workspace(const Program& program, const Batch& batch, char* start, Element* out) : buffers(program.num_buffers) {
    Pieces own{start}, area{nullptr}, common{nullptr};
    if (program.ranks.segment) {
      area.start = open(program.ranks).own_area();
      common.start = open(program.ranks).common_area();
    }
    for (int64_t i = 0; i < program.num_buffers; ++i) {
      const int64_t count = (batch.num_tokens + PANEL) * program.widths[i];
      if (program.places[i] == Place::OWN_AREA)
        buffers[i] = area.take<Element>(count);
      else if (program.places[i] == Place::COMMON_AREA && splits_rows(program, batch))
        buffers[i] = common.take<Element>(count);
      else
        buffers[i] = i == program.output ? out : own.take<Element>(count);
    }
    int64_t part_floats = 0, packed_elements = 0, choice_bytes = 0, integer_bytes = 0;
    for (int64_t i = 0; i < program.num_operations; ++i) {
      const Kind* operation = program.operations[i];
      if (*operation == Kind::DECODE_ATTENTION)
        part_floats = std::max(part_floats, count_part_floats(as<Attention>(operation), batch));
      if (*operation == Kind::PREFILL_ATTENTION)
        packed_elements = std::max(packed_elements, count_packed(as<Attention>(operation), batch, program));
      if (*operation == Kind::BIDIRECTIONAL_ATTENTION)
        packed_elements =
            std::max(packed_elements, count_packed(as<BidirectionalAttention>(operation), batch, program));
      if (*operation == Kind::EXPERTS) {
        Pieces pieces{nullptr};
        Choices(as<Experts>(operation), batch.num_tokens, pieces);
        choice_bytes = std::max(choice_bytes, pieces.num_bytes);
      }
      integer_bytes = std::max(integer_bytes, count_integer_bytes(operation, batch.num_tokens));
    }
    parts = own.take<float>(part_floats);
    packed = own.take<Element>(packed_elements);
    choices = own.take<char>(choice_bytes);
    integers = own.take<char>(integer_bytes);
    num_bytes = own.num_bytes;
  }
};

}  // namespace
}  // namespace inflight

using namespace inflight;

#pragma GCC visibility push(default)
extern "C" {

/// True where this process may use AMX. Called once a process, before anything that uses it.
bool inflight_request_tiles() { return request_tiles(); }

/// The numbers of LAYOUT in their order; -1 behind the last.
int64_t inflight_layout(int64_t index) { return index < static_cast<int64_t>(std::size(LAYOUT)) ? LAYOUT[index] : -1; }

/// Bytes of the area of one rank, or of the common one.
int64_t inflight_area_bytes() { return AREA; }

/// Bytes of the workspace that `inflight_run` needs for a batch.
int64_t inflight_workspace_bytes(const Program* program, const Batch* batch) {
  return Workspace(*program, *batch, nullptr, nullptr).num_bytes;
}

/// All operations of a program, on every rank that it knows. `x` (num_tokens, width of its buffer) is the input, if
/// that is not the token ids; `out` (num_tokens, width of its buffer) takes the result.
void inflight_run(const Program* program, const Batch* batch, int64_t num_threads, const Element* x, Element* out,
                  char* workspace) {
  const Workspace work(*program, *batch, workspace, out);
  const Run step{*program,
                 *batch,
                 work.buffers.data(),
                 work.parts,
                 work.packed,
                 work.choices,
                 work.integers,
                 open(program->ranks),
                 splits_rows(*program, *batch)};
  const Element* const result = work.buffers[program->output];
  if (program->input >= 0)
    std::memcpy(work.buffers[program->input], x, batch->num_tokens * program->widths[program->input] * sizeof(Element));
#pragma omp parallel num_threads(num_threads)
  {
    const Multiplier multiplier;
    // Another rank may be reading what this one has in the areas since the last run.
    if (program->ranks.segment) step.ranks.meet();
    for (int64_t i = 0; i < program->num_operations; ++i) run(program->operations[i], step);
    if (result != out)
      share(batch->num_tokens, [&](int64_t row) {
        const int64_t width = program->widths[program->output];
        std::memcpy(out + row * width, result + row * width, width * sizeof(Element));
      });
  }
}

/// out (num_rows, num_outputs) = x @ weight.T of a packed weight. x has room for 32 rows more.
void inflight_linear(const Instructions* instructions, const Element* x, int64_t num_rows, const Matrix* weight,
                     int64_t num_outputs, int64_t num_threads, Element* out) {
#pragma omp parallel num_threads(num_threads)
  {
    const Multiplier multiplier;
    linear(*instructions, x, weight->num_inputs, num_rows, *weight, nullptr, num_outputs, out, num_outputs, nullptr,
           [](int64_t, int64_t, int64_t, Floats y) { return y; });
  }
}

/// Elements of a packed weight.
int64_t inflight_packed_size(int64_t num_outputs, int64_t num_inputs) {
  return panel_elements(ceil_div(num_outputs, PANEL) * num_inputs);
}

/// `weight` (num_outputs, num_inputs) as panels of 32 rows, or, where `gated`, of 16 of its first half and 16 of its
/// second.
void inflight_pack(const Element* weight, int64_t num_outputs, int64_t num_inputs, bool gated, int64_t num_threads,
                   Element* packed) {
  const int64_t half = num_outputs / 2;
#pragma omp parallel num_threads(num_threads)
  pack_weight(
      weight, num_inputs, ceil_div(num_outputs, PANEL),
      [=](int64_t panel, int64_t n) -> int64_t {
        if (gated) return n < 16 ? 16 * panel + n : half + 16 * panel + n - 16;
        const int64_t row = PANEL * panel + n;
        return row < num_outputs ? row : -1;
      },
      packed);
}
}
#pragma GCC visibility pop
