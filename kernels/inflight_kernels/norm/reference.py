"""RMSNorm and LayerNorm in torch, alone and after a residual addition or an embedding, and with results quantised;
RMSNorm of a part of the columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.norm.part_squares import PartSquares
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


def row_squares(sections: Sequence[Tensor], gate: Tensor | None = None) -> Tensor:
    """Sums of squares of each (T, C), times silu(gate) if there is one."""
    share = 1.0 if gate is None else F.silu(gate.float().contiguous())
    return torch.stack([(x.float() * share).square().sum(1) for x in sections], 1)


def rms_norm_of_part(
    x: Tensor,
    weight: Tensor,
    eps: float,
    squares: PartSquares,
    gate: Tensor | None = None,
    gate_first: bool = False,
) -> Tensor:
    """RMSNorm of (T, C) by the squares of all columns."""
    first, *others = (squares.sums_TP[:, part] for part in squares.parts)
    # torch's rsqrt gives the last numbers of a tensor, which fill no vector, other bits.
    factor = 1.0 / torch.sqrt(sum(others, first) / squares.num_columns + eps)[:, None]
    share = None if gate is None else F.silu(gate.float().contiguous())
    wide = x.float() if share is None or not gate_first else x.float() * share
    normed = wide * factor
    scaled = (normed.to(x.dtype) * weight).float() if weight.dtype == x.dtype else normed * weight
    return (scaled if share is None or gate_first else scaled * share).to(x.dtype)


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
