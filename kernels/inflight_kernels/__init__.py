"""The operations that a transformer's step consists of: triton kernels on a GPU, the same functions in torch on a CPU.

All functions take and return torch tensors. Knows no request, no model and no scheduler; importing it does not need
triton. There is one folder per family of operations, each with the same three parts:

    <family>/__init__.py    the public functions: arguments, results and guarantees, the same for every device
    <family>/reference.py   the same functions in torch, which run on a CPU and which tests compare the kernels with
    <family>/gpu/           the triton kernels, one file per operation: formula, kernel, launcher that checks arguments

Legend of the public functions: T tokens, B sequences, H hidden size, I intermediate size, Hq query heads, Hkv KV heads,
D head_dim, V vocabulary. A KV cache is (num_blocks, block_size, Hkv, D); slot = block_id * block_size + offset. "Float"
is float32, float16 or bfloat16. On a GPU no function waits for the device, and the launchers raise ValueError for an
unsupported shape, dtype or stride; the references check nothing.
"""

from inflight_kernels.activation import activate, activate_and_mul, activate_and_mul_quantized, sigmoid_mul, soft_cap
from inflight_kernels.activation.kinds import Activation
from inflight_kernels.attention import bidirectional_attention, decode_attention, prefill_attention
from inflight_kernels.embeddings import embedding
from inflight_kernels.kv_cache import advance_rows, copy_blocks
from inflight_kernels.kv_cache.slots import cache_slots
from inflight_kernels.kv_cache.step_tokens import StepTokens
from inflight_kernels.lora import lora_add
from inflight_kernels.matmul import (
    block_scaled_linear,
    coded_linear,
    gated_linear,
    head_linear,
    int4_linear,
    linear,
    scaled_linear,
)
from inflight_kernels.matmul.coded_weight import Code, CodedWeight, Inputs, join_halves
from inflight_kernels.matmul.weight_formats import BlockScaledWeight, Int4Weight, pack_int4, quantize_weight
from inflight_kernels.moe import fused_moe, route_experts
from inflight_kernels.norm import (
    embedding_rms_norm,
    embedding_rms_norm_quantized,
    layer_norm,
    rms_norm,
    rms_norm_of_part,
    rms_norm_quantized,
    row_squares,
)
from inflight_kernels.norm.part_squares import PartSquares
from inflight_kernels.quantization import quantize_per_token
from inflight_kernels.recurrent import causal_conv, chunk_shape, gated_delta_rule, gated_rms_norm, state_space_scan
from inflight_kernels.recurrent.gate import Gate
from inflight_kernels.recurrent.step_sequences import StepSequences
from inflight_kernels.rope import rope, rope_and_kv_write, rope_and_latent_write
from inflight_kernels.sampling import (
    log_sum_exp,
    philox_uniform,
    sample,
    sampling_probabilities,
    speculative_sample,
    typical_mask,
)

__all__ = [
    "Activation",
    "BlockScaledWeight",
    "Code",
    "CodedWeight",
    "Gate",
    "Inputs",
    "Int4Weight",
    "PartSquares",
    "StepSequences",
    "StepTokens",
    "activate",
    "activate_and_mul",
    "activate_and_mul_quantized",
    "advance_rows",
    "bidirectional_attention",
    "block_scaled_linear",
    "cache_slots",
    "causal_conv",
    "chunk_shape",
    "coded_linear",
    "copy_blocks",
    "decode_attention",
    "embedding",
    "embedding_rms_norm",
    "embedding_rms_norm_quantized",
    "fused_moe",
    "gated_delta_rule",
    "gated_linear",
    "gated_rms_norm",
    "head_linear",
    "int4_linear",
    "join_halves",
    "layer_norm",
    "linear",
    "log_sum_exp",
    "lora_add",
    "pack_int4",
    "philox_uniform",
    "prefill_attention",
    "quantize_per_token",
    "quantize_weight",
    "rms_norm",
    "rms_norm_of_part",
    "rms_norm_quantized",
    "rope",
    "rope_and_kv_write",
    "rope_and_latent_write",
    "route_experts",
    "row_squares",
    "sample",
    "sampling_probabilities",
    "scaled_linear",
    "sigmoid_mul",
    "soft_cap",
    "speculative_sample",
    "state_space_scan",
    "typical_mask",
]
