"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.attention.gpu.bidirectional_attention import bidirectional_attention
from inflight_kernels.attention.gpu.decode_attention import decode_attention
from inflight_kernels.attention.gpu.prefill_attention import prefill_attention

__all__ = ["bidirectional_attention", "decode_attention", "prefill_attention"]
