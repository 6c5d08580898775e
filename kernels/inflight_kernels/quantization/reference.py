"""Symmetric quantisation of rows in torch, with the same bits as the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SMALLEST = 2.0**-100


def quantize_per_token(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, scale: float | None = None, group_size: int = 0
) -> tuple[Tensor, Tensor]:
    """The rows of x (..., K) quantised to `dtype`, and their scales (...), or those of their groups."""
    if group_size:
        width = x.shape[-1]
        groups = F.pad(x, (0, -width % group_size)).unflatten(-1, (-1, group_size))
        q, scales = quantize_per_token(groups, dtype, scale)
        return q.flatten(-2)[..., :width].contiguous(), scales
    wide, largest = x.float(), LARGEST[dtype]
    if scale is None:
        absmax = wide.abs().amax(-1)
        scales = torch.where(absmax < SMALLEST, 1.0, absmax / largest)
    else:
        scales = wide.new_full(x.shape[:-1], scale)
    scaled = (wide * (1.0 / scales)[..., None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales
