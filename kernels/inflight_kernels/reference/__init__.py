"""The same functions as the kernels, in plain torch: what a CPU serves with and what the kernels' tests compare to.

Shapes and promises are documented in `inflight_kernels.functions`; nothing here checks its arguments.
"""

from inflight_kernels.reference.activation import silu_and_mul, silu_and_mul_quantized
from inflight_kernels.reference.attention import decode_attention, prefill_attention
from inflight_kernels.reference.kv_cache import copy_blocks
from inflight_kernels.reference.linear import int4_linear, linear, scaled_linear
from inflight_kernels.reference.lora import lora_add
from inflight_kernels.reference.moe import fused_moe, route_experts
from inflight_kernels.reference.norm import rms_norm, rms_norm_quantized
from inflight_kernels.reference.philox import philox_uniform
from inflight_kernels.reference.quantization import quantize_per_token
from inflight_kernels.reference.rope import rope_and_kv_write
from inflight_kernels.reference.sampling import sample

__all__ = [
    "copy_blocks",
    "decode_attention",
    "fused_moe",
    "int4_linear",
    "linear",
    "lora_add",
    "philox_uniform",
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
