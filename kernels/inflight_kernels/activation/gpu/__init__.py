"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.activation.gpu.silu_and_mul import silu_and_mul, silu_and_mul_quantized

__all__ = ["silu_and_mul", "silu_and_mul_quantized"]
