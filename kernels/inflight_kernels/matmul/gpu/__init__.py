"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.matmul.gpu.block_scaled_linear import block_scaled_linear
from inflight_kernels.matmul.gpu.gated_linear import gated_linear
from inflight_kernels.matmul.gpu.head_linear import head_linear
from inflight_kernels.matmul.gpu.int4_linear import int4_linear
from inflight_kernels.matmul.gpu.linear import linear
from inflight_kernels.matmul.gpu.scaled_linear import scaled_linear

__all__ = ["block_scaled_linear", "gated_linear", "head_linear", "int4_linear", "linear", "scaled_linear"]
