// The layers of a decoder on a CPU: bfloat16 weights, activations and cache, sums in float32. Called from
// decoder_stack.py.
//
// One parallel region for all layers: every thread walks through all operations, and in each takes items until none is
// left. Rounding is the torch reference's: once after each operation.
#include <omp.h>

#include "decode_attention.h"
#include "pointwise.h"
#include "prefill_attention.h"

namespace inflight {
namespace {

/// Memory that a step works in, cut from one piece. Rows have room for 32 more: products read whole tiles.
struct Workspace {
  Bf16 *normed, *qkv, *attended, *gated, *packed;
  float* parts;
  int64_t num_bytes;

  /// `start` may be null where only `num_bytes` matters.
  Workspace(const Network& network, const Batch& batch, int64_t num_parts, char* start) : num_bytes(0) {
    const auto take = [&](int64_t bytes) {
      char* taken = start ? start + num_bytes : nullptr;
      num_bytes += round_up(bytes, 4096);
      return taken;
    };
    const int64_t rows = batch.num_tokens + PANEL;
    const auto take_rows = [&](int64_t size) { return reinterpret_cast<Bf16*>(take(rows * size * sizeof(Bf16))); };
    normed = take_rows(network.hidden);
    qkv = take_rows(network.qkv_size());
    attended = take_rows(network.query_size());
    gated = take_rows(network.intermediate);
    parts = reinterpret_cast<float*>(
        take(batch.num_decodes * network.num_heads * num_parts * part_size(network) * sizeof(float)));
    packed = reinterpret_cast<Bf16*>(take(count_packed(network, batch) * sizeof(Bf16)));
  }
};

void attention(const Network& network, const Layer& layer, const Batch& batch, int64_t num_parts,
               const Workspace& work) {
  if (batch.num_decodes) decode_attention(network, layer, batch, num_parts, work.qkv, work.parts, work.attended);
  if (batch.num_prefills)
    prefill_attention(network, layer, batch, work.qkv + batch.num_decodes * network.qkv_size(), work.packed,
                      work.attended + batch.num_decodes * network.query_size());
}

/// `hidden` is what the layer before has added, and becomes what this one adds.
void decoder_layer(const Network& network, const Layer& layer, const Batch& batch, int64_t num_parts,
                   const Workspace& work, Bf16* hidden, Bf16* residual) {
  const int64_t rows = batch.num_tokens, size = network.hidden, inner = network.intermediate;
  add_norm(hidden, residual, layer.input_norm, rows, size, network.norm_eps, work.normed);
  linear(network.instructions, work.normed, rows, layer.qkv, layer.qkv_bias, size, network.qkv_size(), work.qkv);
  rope_and_write(network, layer, batch, work.qkv);
  attention(network, layer, batch, num_parts, work);
  linear(network.instructions, work.attended, rows, layer.output, layer.output_bias, network.query_size(), size,
         hidden);
  add_norm(hidden, residual, layer.post_norm, rows, size, network.norm_eps, work.normed);
  gated_linear(network.instructions, work.normed, rows, layer.gate_up, layer.gate_up_bias, size, inner, work.gated);
  linear(network.instructions, work.gated, rows, layer.down, layer.down_bias, inner, size, hidden);
}

}  // namespace
}  // namespace inflight

using namespace inflight;

extern "C" {

/// True where this process may use AMX. Once a process, before anything that uses it.
bool inflight_request_tiles() { return request_tiles(); }

/// Bytes of the workspace that `inflight_decode` needs for a batch.
int64_t inflight_workspace_bytes(const Network* network, const Batch* batch, int64_t num_threads) {
  const int64_t num_parts = count_parts(*network, *batch, num_threads);
  return Workspace(*network, *batch, num_parts, nullptr).num_bytes;
}

/// All layers and the last norm, in place: `hidden` (num_tokens, hidden) are the embedded tokens, then what the head
/// takes; `residual` is its like, zeros before.
void inflight_decode(const Network* network, const Layer* layers, const Batch* batch, int64_t num_threads, Bf16* hidden,
                     Bf16* residual, char* workspace) {
  const int64_t num_parts = count_parts(*network, *batch, num_threads);
  const Workspace work(*network, *batch, num_parts, workspace);
#pragma omp parallel num_threads(num_threads)
  {
    const Multiplier multiplier(network->instructions);
    for (int64_t i = 0; i < network->num_layers; ++i)
      decoder_layer(*network, layers[i], *batch, num_parts, work, hidden, residual);
    add_norm(hidden, residual, network->norm, batch->num_tokens, network->hidden, network->norm_eps, hidden);
  }
}

/// out (num_rows, num_outputs) = x @ weight.T of a packed weight. x has room for 32 rows more.
void inflight_linear(const Instructions* instructions, const Bf16* x, int64_t num_rows, const Bf16* packed,
                     int64_t num_inputs, int64_t num_outputs, int64_t num_threads, Bf16* out) {
#pragma omp parallel num_threads(num_threads)
  {
    const Multiplier multiplier(*instructions);
    linear(*instructions, x, num_rows, packed, nullptr, num_inputs, num_outputs, out);
  }
}

/// Elements of a packed weight.
int64_t inflight_packed_size(int64_t num_outputs, int64_t num_inputs) {
  return panel_elements(ceil_div(num_outputs, PANEL) * num_inputs);
}

/// `weight` (num_outputs, num_inputs) as panels of 32 rows, or, where `gated`, of 16 of its first half and 16 of its
/// second.
void inflight_pack(const Bf16* weight, int64_t num_outputs, int64_t num_inputs, bool gated, int64_t num_threads,
                   Bf16* packed) {
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
