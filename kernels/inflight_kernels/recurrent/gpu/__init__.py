"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.recurrent.chunk import chunk_shape
from inflight_kernels.recurrent.gpu.causal_conv import causal_conv
from inflight_kernels.recurrent.gpu.gated_delta_rule import gated_delta_rule
from inflight_kernels.recurrent.gpu.gated_rms_norm import gated_rms_norm
from inflight_kernels.recurrent.gpu.state_space_scan import state_space_scan

__all__ = ["causal_conv", "chunk_shape", "gated_delta_rule", "gated_rms_norm", "state_space_scan"]
