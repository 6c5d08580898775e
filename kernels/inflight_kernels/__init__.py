"""The operations that a transformer's step is made of: triton kernels on a GPU, the same functions in torch on a CPU.

Torch in, torch out. Knows no request, no model and no scheduler; importing it needs no triton.
"""

from inflight_kernels.functions import (
    copy_blocks,
    decode_attention,
    fused_moe,
    int4_linear,
    linear,
    lora_add,
    philox_uniform,
    prefill_attention,
    quantize_per_token,
    rms_norm,
    rms_norm_quantized,
    rope_and_kv_write,
    route_experts,
    sample,
    scaled_linear,
    silu_and_mul,
    silu_and_mul_quantized,
)
from inflight_kernels.weight_formats import Int4Weight, pack_int4, quantize_weight, repack_awq, repack_gptq

__all__ = [
    "Int4Weight",
    "copy_blocks",
    "decode_attention",
    "fused_moe",
    "int4_linear",
    "linear",
    "lora_add",
    "pack_int4",
    "philox_uniform",
    "prefill_attention",
    "quantize_per_token",
    "quantize_weight",
    "repack_awq",
    "repack_gptq",
    "rms_norm",
    "rms_norm_quantized",
    "rope_and_kv_write",
    "route_experts",
    "sample",
    "scaled_linear",
    "silu_and_mul",
    "silu_and_mul_quantized",
]
