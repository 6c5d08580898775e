"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.moe.gpu.fused_moe import fused_moe
from inflight_kernels.moe.gpu.route_experts import route_experts

__all__ = ["fused_moe", "route_experts"]
