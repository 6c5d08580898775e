"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.activation.gpu.activate import activate
from inflight_kernels.activation.gpu.activate_and_mul import activate_and_mul, activate_and_mul_quantized
from inflight_kernels.activation.gpu.sigmoid_mul import sigmoid_mul
from inflight_kernels.activation.gpu.soft_cap import soft_cap

__all__ = ["activate", "activate_and_mul", "activate_and_mul_quantized", "sigmoid_mul", "soft_cap"]
