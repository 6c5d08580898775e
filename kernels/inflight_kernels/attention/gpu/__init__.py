"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.attention.gpu.decode_attention import decode_attention
from inflight_kernels.attention.gpu.prefill_attention import prefill_attention

__all__ = ["decode_attention", "prefill_attention"]
