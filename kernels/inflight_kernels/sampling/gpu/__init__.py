"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.sampling.gpu.sampling import sample

__all__ = ["sample"]
