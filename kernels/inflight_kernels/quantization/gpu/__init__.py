"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.quantization.gpu.quantize_per_token import quantize_per_token

__all__ = ["quantize_per_token"]
