"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.recurrent.gpu.causal_conv import causal_conv

__all__ = ["causal_conv"]
