"""The triton kernels, one operation a file: formula, kernel, launcher that checks and launches.

Importing this imports triton. The functions take the place of the modules of the same name in this namespace.
"""

from inflight_kernels.ops.copy_blocks import copy_blocks
from inflight_kernels.ops.decode_attention import decode_attention
from inflight_kernels.ops.fused_moe import fused_moe
from inflight_kernels.ops.int4_linear import int4_linear
from inflight_kernels.ops.linear import linear
from inflight_kernels.ops.lora_add import lora_add
from inflight_kernels.ops.prefill_attention import prefill_attention
from inflight_kernels.ops.quantize_per_token import quantize_per_token
from inflight_kernels.ops.rms_norm import rms_norm, rms_norm_quantized
from inflight_kernels.ops.rope_kv_write import rope_and_kv_write
from inflight_kernels.ops.route_experts import route_experts
from inflight_kernels.ops.sampling import sample
from inflight_kernels.ops.scaled_linear import scaled_linear
from inflight_kernels.ops.silu_and_mul import silu_and_mul, silu_and_mul_quantized

__all__ = [
    "copy_blocks",
    "decode_attention",
    "fused_moe",
    "int4_linear",
    "linear",
    "lora_add",
    "prefill_attention",
    "quantize_per_token",
    "rms_norm",
    "rms_norm_quantized",
    "rope_and_kv_write",
    "route_experts",
    "sample",
    "scaled_linear",
    "silu_and_mul",
    "silu_and_mul_quantized",
]
