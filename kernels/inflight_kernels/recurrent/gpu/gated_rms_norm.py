"""RMSNorm of each group of columns, such as a head, and a gate behind it or before it.

    y = round(round(weight * round(x / sqrt(mean(x^2) + eps))) * f(gate))
    y = round(weight * round(h / sqrt(mean(h^2) + eps))),   h = x * f(gate)          (with the gate before the norm)

round() is to the dtype of x; with a float32 weight beside another dtype only the result is rounded. Bytes per row of C
columns in bf16: 6 C. About 15 operations per element: memory bandwidth is the lower bound. 8k rows of 4096: 201 MB, 47
us at 4.3 TB/s.

A program holds groups in registers and reads them once. Nothing in the launch that affects the order of the sums
depends on the number of rows: a row's result is bitwise the same alone and in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.activations import activated
from inflight_kernels.common.checks import (
    cdiv,
    check_dtype,
    check_float,
    check_shape,
    check_unit_stride,
    next_power_of_2,
)
from inflight_kernels.recurrent.gate import Gate

# Sixteen elements of each of 128 threads: two loads of 16 bytes of bf16. Not measured yet.
TILE = 2048
MAX_GROUP_SIZE = 16384


@triton.jit
def gate_of(x, GATE: tl.constexpr):
    if GATE == "silu":
        return activated(x, "silu")
    else:
        return 1.0 / (1.0 + tl.exp(-x))


# One compiled kernel for every number of rows: triton would otherwise specialise for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_groups"])
def gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    num_groups,
    groups_of_row,
    group_size,
    stride_x,
    stride_gate,
    eps,
    GATE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SHARED_WEIGHT: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    dtype = x_ptr.dtype.element_ty
    offs_g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < group_size
    mask = (offs_g < num_groups)[:, None] & mask_e[None, :]
    row, column = offs_g // groups_of_row, offs_g % groups_of_row * group_size
    offs = column[:, None] + offs_e[None, :]
    if SHARED_WEIGHT:
        weight = tl.load(weight_ptr + offs_e, mask=mask_e, other=0.0).to(tl.float32)[None, :]
    else:
        weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row[:, None] * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row[:, None] * stride_gate + offs, mask=mask, other=0.0).to(tl.float32)
    share = gate_of(gate, GATE)
    if GATE_FIRST:
        x *= share
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / group_size + eps)[:, None]
    if ROUND:
        y = y.to(dtype).to(tl.float32)
    y *= weight
    if not GATE_FIRST:
        if ROUND:
            y = y.to(dtype).to(tl.float32)
        y *= share
    tl.store(y_ptr + row[:, None] * (groups_of_row * group_size) + offs, y.to(dtype), mask=mask)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: Gate = Gate.SILU,
    group_size: int | None = None,
    gate_first: bool = False,
) -> Tensor:
    """Launch the norm of `x` (T, C); see `inflight_kernels.gated_rms_norm`."""
    check_float("x", x)
    if x.dim() != 2 or weight.dim() != 1:
        raise ValueError(f"x must be (num_tokens, columns) and weight a vector, got {x.dim()} and {weight.dim()} dims")
    num_tokens, width = x.shape
    size = group_size or weight.shape[0]
    if size < 1 or width % size or weight.shape[0] not in (size, width):
        raise ValueError(
            f"{width} columns are not groups of {size} with a weight of {weight.shape[0]}, which is that of a group or "
            "of all columns"
        )
    if size > MAX_GROUP_SIZE:
        raise ValueError(f"gated_rms_norm holds a group in registers: at most {MAX_GROUP_SIZE} elements, got {size}")
    if weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"weight must be {x.dtype} or float32, got {weight.dtype}")
    check_shape("gate", gate, (num_tokens, width))
    check_dtype("gate", gate, x.dtype)
    for name, tensor in (("x", x), ("gate", gate), ("weight", weight)):
        check_unit_stride(name, tensor)
    y = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if y.numel():
        num_groups, block_e = num_tokens * (width // size), next_power_of_2(size)
        block_g = max(TILE // block_e, 1)
        gated_rms_norm_kernel[(cdiv(num_groups, block_g),)](
            x,
            gate,
            weight,
            y,
            num_groups,
            width // size,
            size,
            x.stride(0),
            gate.stride(0),
            eps,
            GATE=activation.value,
            GATE_FIRST=gate_first,
            SHARED_WEIGHT=weight.shape[0] == size,
            ROUND=weight.dtype == x.dtype,
            BLOCK_G=block_g,
            BLOCK_E=block_e,
            num_warps=min(max(block_e // 512, 4), 16),
        )
    return y
