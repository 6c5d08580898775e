"""The public functions: what each takes, gives and promises, whichever device runs it. One file a family.

Legend: T tokens, B sequences, H hidden size, I intermediate size, Hq query heads, Hkv KV heads, D head_dim, V
vocabulary. A KV cache is (num_blocks, block_size, Hkv, D); slot = block_id * block_size + offset. "Float" is float32,
float16 or bfloat16. On a GPU no function here waits for the device, and the launchers raise ValueError for a shape,
dtype or stride that they cannot take. The same stem in `reference/` is the function in torch, in `ops/` the kernel.
"""

from inflight_kernels.functions.activation import silu_and_mul, silu_and_mul_quantized
from inflight_kernels.functions.attention import decode_attention, prefill_attention
from inflight_kernels.functions.kv_cache import copy_blocks
from inflight_kernels.functions.linear import int4_linear, linear, scaled_linear
from inflight_kernels.functions.lora import lora_add
from inflight_kernels.functions.moe import fused_moe, route_experts
from inflight_kernels.functions.norm import rms_norm, rms_norm_quantized
from inflight_kernels.functions.quantization import quantize_per_token
from inflight_kernels.functions.rope import rope_and_kv_write
from inflight_kernels.functions.sampling import philox_uniform, sample

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
