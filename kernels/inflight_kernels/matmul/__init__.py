"""Linear layers: of floats, also activated or for each head; of 8 bits; of weights of 4 or 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.dispatch import implementation
from inflight_kernels.matmul.coded_weight import CodedWeight
from inflight_kernels.matmul.weight_formats import BlockScaledWeight, Int4Weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """x W^T + bias for `x` (T, K), `weight` (N, K) and `bias` (N,), float and of one dtype; returns (T, N).

    On a GPU cuBLAS multiplies, or for up to 64 tokens a kernel that reads each weight once, where the device's tuned
    table says so. `deterministic`: the kernel, for any number of tokens; a row's result is bitwise independent of the
    other rows and of their number.
    """
    result: Tensor = implementation(x, __name__).linear(x, weight, bias, deterministic)
    return result


def head_linear(x: Tensor, weight: Tensor, out: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """x[:, h] W[h]^T of each head h, for `x` (T, heads, K) and `weight` (heads, N, K), float and of one dtype; returns
    (T, heads, N), written to `out` if given. Heads of `x` and `out` may be parts of wider ones. `deterministic` as in
    `linear`.
    """
    result: Tensor = implementation(x, __name__).head_linear(x, weight, out, deterministic)
    return result


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    deterministic: bool = False,
    activation: Activation = Activation.SILU,
) -> Tensor:
    """`activate_and_mul` of `linear`: the first half of the rows of `weight` (2 I, K) is the gate; returns (T, I).

    On a GPU one kernel, or two, on the same conditions as `linear`; `deterministic` as there.
    """
    result: Tensor = implementation(x, __name__).gated_linear(x, weight, bias, deterministic, activation)
    return result


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
) -> Tensor:
    """(x * x_scale) (weight * weight_scale)^T + bias of quantised operands; returns (T, N) of `out_dtype`.

    `x` (T, K) and `weight` (N, K) are both float8_e4m3fn or both int8, `x_scale` (T,) and `weight_scale` (N,) float32
    as returned by `quantize_per_token` and `quantize_weight`, `bias` (N,) float. Products are added in float32 (fp8) or
    exactly (int8). fp8 needs compute capability 8.9; on an older GPU it raises ValueError. `deterministic` as in
    `linear`.
    """
    function = implementation(x, __name__).scaled_linear
    result: Tensor = function(x, x_scale, weight, weight_scale, bias, out_dtype, deterministic)
    return result


def block_scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: BlockScaledWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
) -> Tensor:
    """The same of `x` (T, K) and `weight` (N, K) of float8_e4m3fn that have a scale for each group of 128 inputs.

    `x` and `x_scale` (T, ceil(K / 128)) are as `quantize_per_token` returns them for `group_size` `BLOCK_INPUTS`. The
    products of a group are added up, multiplied by both scales, and added to those of the others in float32. Devices
    and `deterministic` as in `scaled_linear`.
    """
    function = implementation(x, __name__).block_scaled_linear
    result: Tensor = function(x, x_scale, weight, bias, out_dtype, deterministic)
    return result


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """x W^T + bias for `x` (T, K) float of the dtype of the weight's scales; returns (T, N).

    `weight` comes from `pack_int4`; groups hold a multiple of 32 columns. Weights are
    dequantised to the dtype of x, products are added in float32. `deterministic` as in `linear`.
    """
    result: Tensor = implementation(x, __name__).int4_linear(x, weight, bias, deterministic)
    return result


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """x W^T + bias for `x` (T, K) float and `bias` (N,) of its dtype; returns (T, N). On a CPU only.

    Products, with `x` or with what `weight.inputs` makes of it, are added in float32 and rounded once.
    `deterministic` as in `linear`.
    """
    result: Tensor = implementation(x, __name__).coded_linear(x, weight, bias, deterministic)
    return result
