"""RMSNorm of some of the columns that are normalised together, whose other columns other ranks have; and a gate behind
it or before it.

    y = round(weight * round(x / sqrt(sum of squares / columns + eps)))
    y = round(round(weight * round(x / ...)) * silu(gate))
    y = round(weight * round(h / ...)),   h = x * silu(gate)                         (with the gate before the norm)

round() is to the dtype of x; with a float32 weight beside another dtype only the result is rounded. The sum of squares
is that of all parts (`row_squares`), added up in their order. Bytes per row of C columns in bf16: 4 C, or 6 C with a
gate. Memory bandwidth is the lower bound: 16384 rows of 2048 are 134 MB, 31 us at 4.3 TB/s.

The launch configuration does not change a bit of the result.
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
    check_vector,
    next_power_of_2,
)
from inflight_kernels.norm.part_squares import PartSquares

# 16-byte loads of bf16 by each of 128 threads. Not measured yet.
BLOCK_C = 1024


@triton.jit
def rms_norm_of_part_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    sums_ptr,
    y_ptr,
    size,
    stride_x,
    stride_gate,
    stride_sums,
    num_columns,
    eps,
    FIRST_PART: tl.constexpr,
    PART_STEP: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    dtype = x_ptr.dtype.element_ty
    # Neighbouring programs take neighbouring columns.
    num_blocks = tl.cdiv(size, BLOCK_C)
    pid_t = (tl.program_id(0) // num_blocks).to(tl.int64)
    offs_c = (tl.program_id(0) % num_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = offs_c < size
    squares = tl.load(sums_ptr + pid_t * stride_sums + FIRST_PART)
    for part in tl.static_range(1, NUM_PARTS):
        squares += tl.load(sums_ptr + pid_t * stride_sums + FIRST_PART + part * PART_STEP)
    weight = tl.load(weight_ptr + offs_c, mask=mask, other=0.0)
    x = tl.load(x_ptr + pid_t * stride_x + offs_c, mask=mask, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + pid_t * stride_gate + offs_c, mask=mask, other=0.0).to(tl.float32)
        share = activated(gate, "silu")
        if GATE_FIRST:
            x *= share
    y = x * tl.rsqrt(squares / num_columns + eps)
    if weight.dtype == dtype:
        y = y.to(dtype).to(tl.float32)
    y *= weight.to(tl.float32)
    if gate_ptr is not None and not GATE_FIRST:
        if weight.dtype == dtype:
            y = y.to(dtype).to(tl.float32)
        y *= share
    tl.store(y_ptr + pid_t * size + offs_c, y.to(dtype), mask=mask)


def rms_norm_of_part(
    x: Tensor,
    weight: Tensor,
    eps: float,
    squares: PartSquares,
    gate: Tensor | None = None,
    gate_first: bool = False,
) -> Tensor:
    """Launch the norm of `x` (T, C); see `inflight_kernels.rms_norm_of_part`."""
    check_float("x", x)
    if x.dim() != 2:
        raise ValueError(f"x must be (num_tokens, columns), got {tuple(x.shape)}")
    num_tokens, size = x.shape
    check_vector("weight", weight, size, torch.float32 if weight.dtype == torch.float32 else x.dtype)
    check_unit_stride("x", x)
    if gate is not None:
        check_shape("gate", gate, (num_tokens, size))
        check_dtype("gate", gate, x.dtype)
        check_unit_stride("gate", gate)
    sums, parts = squares.sums_TP, squares.parts
    check_dtype("sums_TP", sums, torch.float32)
    check_unit_stride("sums_TP", sums)
    if len(sums) != num_tokens or not parts or parts[-1] >= sums.shape[1]:
        raise ValueError(f"sums_TP must be ({num_tokens}, columns) with those of {parts}, got {tuple(sums.shape)}")
    y = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if y.numel():
        block_c = min(BLOCK_C, next_power_of_2(size))
        rms_norm_of_part_kernel[(num_tokens * cdiv(size, block_c),)](
            x,
            gate,
            weight,
            sums,
            y,
            size,
            x.stride(0),
            0 if gate is None else gate.stride(0),
            sums.stride(0),
            squares.num_columns,
            eps,
            FIRST_PART=parts.start,
            PART_STEP=parts.step,
            NUM_PARTS=len(parts),
            GATE_FIRST=gate_first,
            BLOCK_C=block_c,
            num_warps=4,
        )
    return y
