"""The triton kernels, one operation a file: formula, kernel, launcher that checks and launches.

Importing this imports triton. The functions take the place of the modules of the same name in this namespace.
"""

from inflight_kernels.ops.decode_attention import decode_attention
from inflight_kernels.ops.prefill_attention import prefill_attention
from inflight_kernels.ops.rms_norm import rms_norm
from inflight_kernels.ops.rope_kv_write import rope_and_kv_write
from inflight_kernels.ops.sampling import sample
from inflight_kernels.ops.silu_and_mul import silu_and_mul

__all__ = [
    "decode_attention",
    "prefill_attention",
    "rms_norm",
    "rope_and_kv_write",
    "sample",
    "silu_and_mul",
]
