"""The operations that a transformer's step is made of: triton kernels on a GPU, the same functions in torch on a CPU.

Torch in, torch out. Knows no request, no model and no scheduler; importing it needs no triton.
"""

from inflight_kernels.functions import (
    decode_attention,
    philox_uniform,
    prefill_attention,
    rms_norm,
    rope_and_kv_write,
    sample,
    silu_and_mul,
)

__all__ = [
    "decode_attention",
    "philox_uniform",
    "prefill_attention",
    "rms_norm",
    "rope_and_kv_write",
    "sample",
    "silu_and_mul",
]
