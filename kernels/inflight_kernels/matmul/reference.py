"""The linear layers in torch: float, activated, 8-bit times 8-bit, and 4-bit weights dequantised."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.activation.reference import activate_and_mul
from inflight_kernels.matmul.coded_weight import CodedWeight, Inputs
from inflight_kernels.matmul.weight_formats import BLOCK_INPUTS, BlockScaledWeight, Int4Weight
from inflight_kernels.quantization.reference import quantize_per_token


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


def head_linear(x: Tensor, weight: Tensor, out: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """x[:, h] W[h]^T of each head h."""
    y = _by_row(lambda rows: torch.bmm(rows.transpose(0, 1), weight.mT).transpose(0, 1), x, deterministic)
    return y.contiguous() if out is None else out.copy_(y)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    deterministic: bool = False,
    activation: Activation = Activation.SILU,
) -> Tensor:
    """f(gate) * up of x W^T + bias = [gate | up]."""
    return activate_and_mul(linear(x, weight, bias, deterministic), activation)


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


def block_scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: BlockScaledWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
) -> Tensor:
    """Product of the dequantised operands, plus bias, in float32 and rounded once."""
    values = weight.dequantize()
    wide = x.float() * x_scale.repeat_interleave(BLOCK_INPUTS, 1)[:, : x.shape[1]]
    y = _by_row(lambda rows: F.linear(rows, values), wide, deterministic)
    return (y if bias is None else y + bias.float()).to(out_dtype)


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """Product with the weight dequantised to its dtype."""
    values = weight.dequantize()
    return _by_row(lambda rows: F.linear(rows, values, bias), x, deterministic)


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """Product with the weight dequantised, and so with inputs that are quantised, in float32 and rounded once."""
    if weight.permutation is not None:
        x, weight = x[:, weight.permutation], weight._replace(permutation=None)
    values, added = weight.dequantize(), None if bias is None else bias.float()
    wide = x.float() if weight.inputs is Inputs.KEPT else _rounded_to_int8(x, weight.group_size)
    return _by_row(lambda rows: F.linear(rows, values, added).to(x.dtype), wide, deterministic)


def _rounded_to_int8(x: Tensor, group_size: int) -> Tensor:
    """(T, K) float32: what its groups are after they were quantised."""
    q, scales = quantize_per_token(x, torch.int8, group_size=group_size)
    return q.float() * scales.repeat_interleave(group_size, -1)[:, : x.shape[1]]
