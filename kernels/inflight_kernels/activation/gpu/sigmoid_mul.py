"""A gate for what a part of a layer computes, one for each token, as of Qwen2-MoE's shared expert, or for each feature.

    y = round(x * sigmoid(gate)),   sigmoid(g) = 1 / (1 + exp(-g))

Bytes per row of I columns: 4 I in bf16, or 6 I with a gate for each. Memory bandwidth is the lower bound: 16384 rows of
2048 are 134 MB, 31 us at 4.3 TB/s; 64 rows cost only the launch.

The launch configuration does not change a bit of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import (
    cdiv,
    check_dtype,
    check_float,
    check_shape,
    check_unit_stride,
    next_power_of_2,
)

# 16-byte loads of bf16 by each of 128 threads. Not measured yet.
BLOCK_I = 1024


@triton.jit
def sigmoid_mul_kernel(
    x_ptr, gate_ptr, y_ptr, width, stride_x, stride_gate, ONE_GATE: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip
    # Neighbouring programs take neighbouring columns.
    num_blocks = tl.cdiv(width, BLOCK_I)
    pid_t = (tl.program_id(0) // num_blocks).to(tl.int64)
    offs_i = (tl.program_id(0) % num_blocks) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = offs_i < width
    x = tl.load(x_ptr + pid_t * stride_x + offs_i, mask=mask, other=0.0).to(tl.float32)
    if ONE_GATE:
        gate = tl.load(gate_ptr + pid_t * stride_gate).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + pid_t * stride_gate + offs_i, mask=mask, other=0.0).to(tl.float32)
    y = x * (1.0 / (1.0 + tl.exp(-gate)))
    tl.store(y_ptr + pid_t * width + offs_i, y.to(y_ptr.dtype.element_ty), mask=mask)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Launch the gate of `x` (T, I); see `inflight_kernels.sigmoid_mul`."""
    check_float("x", x)
    if x.dim() != 2:
        raise ValueError(f"x must be (num_tokens, width), got {tuple(x.shape)}")
    num_tokens, width = x.shape
    one_gate = gate.dim() == 2 and gate.shape[1] == 1
    check_shape("gate", gate, (num_tokens, 1) if one_gate else (num_tokens, width))
    check_dtype("gate", gate, x.dtype)
    check_unit_stride("x", x)
    check_unit_stride("gate", gate)
    y = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if y.numel():
        block_i = min(BLOCK_I, next_power_of_2(width))
        sigmoid_mul_kernel[(num_tokens * cdiv(width, block_i),)](
            x, gate, y, width, x.stride(0), gate.stride(0), ONE_GATE=one_gate, BLOCK_I=block_i, num_warps=4
        )
    return y
