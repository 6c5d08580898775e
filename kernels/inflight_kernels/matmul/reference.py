"""The linear layers in torch: float, activated, 8-bit times 8-bit, and 4-bit weights dequantised."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.activation.reference import silu_and_mul
from inflight_kernels.matmul.coded_weight import CodedWeight
from inflight_kernels.matmul.weight_formats import Int4Weight


def _by_row(product: Callable[[Tensor], Tensor], x: Tensor, deterministic: bool) -> Tensor:
    """`product(x)`; deterministic: row by row, because on a CPU the order of additions depends on the batch."""
    if not deterministic or len(x) < 2:
        return product(x)
    return torch.cat([product(row) for row in x.split(1)])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """x W^T + bias."""
    if not deterministic:
        return F.linear(x, weight, bias)
    return _by_row(lambda rows: F.linear(rows, weight, bias), x, deterministic)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """silu(gate) * up of x W^T + bias = [gate | up]."""
    return silu_and_mul(linear(x, weight, bias, deterministic))


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
) -> Tensor:
    """Product of quantised values, exact for int8, times both scales, plus bias, in float32 and rounded once."""
    # Sums of int8 products exceed float32's 24 bits; float64 is exact, so that the order of additions has no effect.
    wide = torch.float64 if x.dtype == torch.int8 else torch.float32
    values = weight.to(wide)
    total = _by_row(lambda rows: rows.to(wide) @ values.T, x, deterministic).float()
    y = total * weight_scale * x_scale[:, None]
    return (y if bias is None else y + bias.float()).to(out_dtype)


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """Product with the weight dequantised to its dtype."""
    values = weight.dequantize()
    return _by_row(lambda rows: F.linear(rows, values, bias), x, deterministic)


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """Product with the weight dequantised, in float32 and rounded once."""
    values, added = weight.dequantize(), None if bias is None else bias.float()
    return _by_row(lambda rows: F.linear(rows.float(), values, added).to(x.dtype), x, deterministic)
