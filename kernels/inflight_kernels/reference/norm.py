"""RMSNorm in torch, alone and after a residual addition."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of (..., H), after adding a residual if there is one."""
    if residual is None:
        # torch computes the norm in float32 and rounds once; multiplying apart keeps the second rounding.
        return F.rms_norm(x, (x.shape[-1],), None, eps) * weight
    total = x + residual
    return F.rms_norm(total, (x.shape[-1],), None, eps) * weight, total
