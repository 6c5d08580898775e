"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.lora.gpu.lora_add import lora_add

__all__ = ["lora_add"]
