"""RMSNorm and LayerNorm in torch, alone and after a residual addition or an embedding, and with results quantised."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.quantization.reference import quantize_per_token


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of (..., H), after adding a residual if there is one."""
    if residual is None:
        return _rms_norm(x, weight, eps)
    total = x + residual
    return _rms_norm(total, weight, eps), total


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype != x.dtype:
        return (F.rms_norm(x.float(), (x.shape[-1],), None, eps) * weight).to(x.dtype)
    # torch computes the norm in float32 and rounds once; the separate multiplication rounds a second time.
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm of (..., H), after adding a residual if there is one."""
    if residual is None:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    total = x + residual
    return F.layer_norm(total, (x.shape[-1],), weight, bias, eps), total


def embedding_rms_norm(token_ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of rows of a table, and these."""
    embedded = F.embedding(token_ids, table)
    normed = rms_norm(embedded, weight, eps)
    assert isinstance(normed, Tensor)
    return normed, embedded


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float | None = None,
    group_size: int = 0,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """The same quantised to `dtype`, with the scales of the rows or groups; the sum is last if there is a residual."""
    normed = rms_norm(x, weight, eps, residual)
    if isinstance(normed, Tensor):
        return quantize_per_token(normed, dtype, scale, group_size)
    return (*quantize_per_token(normed[0], dtype, scale, group_size), normed[1])


def embedding_rms_norm_quantized(
    token_ids: Tensor,
    table: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float | None = None,
    group_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm of rows of a table, quantised to `dtype` with their scales, and these rows."""
    normed, embedded = embedding_rms_norm(token_ids, table, weight, eps)
    return (*quantize_per_token(normed, dtype, scale, group_size), embedded)
