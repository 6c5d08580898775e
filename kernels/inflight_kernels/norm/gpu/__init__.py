"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.norm.gpu.layer_norm import layer_norm
from inflight_kernels.norm.gpu.rms_norm import (
    embedding_rms_norm,
    embedding_rms_norm_quantized,
    rms_norm,
    rms_norm_quantized,
)
from inflight_kernels.norm.gpu.rms_norm_of_part import rms_norm_of_part
from inflight_kernels.norm.gpu.row_squares import row_squares

__all__ = [
    "embedding_rms_norm",
    "embedding_rms_norm_quantized",
    "layer_norm",
    "rms_norm",
    "rms_norm_of_part",
    "rms_norm_quantized",
    "row_squares",
]
