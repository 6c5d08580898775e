"""The sums of the squares of each row's columns, for a norm of more columns than a rank has.

    sum = sum(h^2),   h = x, or x * silu(gate)

Bytes per row of C columns in bf16: 2 C, or 4 C with a gate. Memory bandwidth is the lower bound: 16384 rows of 2048 are
67 MB, 16 us at 4.3 TB/s; 64 rows cost only the launch.

A program sums one row, in tiles of columns whose sizes depend on the columns alone: a row's sum is bitwise the same
alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.activations import activated
from inflight_kernels.common.checks import check_dtype, check_float, check_shape, check_unit_stride, next_power_of_2

# Sixteen elements of each of 128 threads: two loads of 16 bytes of bf16. Not measured yet.
TILE = 2048


@triton.jit
def row_squares_kernel(x_ptr, gate_ptr, sum_ptr, size, stride_x, stride_gate, num_sections, BLOCK_C: tl.constexpr):
    pid_t = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, size, BLOCK_C):
        offs_c = start + tl.arange(0, BLOCK_C)
        mask = offs_c < size
        x = tl.load(x_ptr + pid_t * stride_x + offs_c, mask=mask, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + pid_t * stride_gate + offs_c, mask=mask, other=0.0).to(tl.float32)
            x *= activated(gate, "silu")
        squares += x * x
    tl.store(sum_ptr + pid_t * num_sections, tl.sum(squares, axis=0))


def row_squares(sections: Sequence[Tensor], gate: Tensor | None = None) -> Tensor:
    """Launch the sums of each of `sections` (T, C); see `inflight_kernels.row_squares`."""
    num_tokens = len(sections[0])
    sums = torch.empty((num_tokens, len(sections)), dtype=torch.float32, device=sections[0].device)
    for number, x in enumerate(sections):
        check_float("x", x)
        if x.dim() != 2 or len(x) != num_tokens:
            raise ValueError(f"x must be ({num_tokens}, columns), got {tuple(x.shape)}")
        check_unit_stride("x", x)
        if gate is not None:
            check_shape("gate", gate, tuple(x.shape))
            check_dtype("gate", gate, x.dtype)
            check_unit_stride("gate", gate)
        if num_tokens:
            row_squares_kernel[(num_tokens,)](
                x,
                gate,
                sums[:, number:],
                x.shape[1],
                x.stride(0),
                0 if gate is None else gate.stride(0),
                len(sections),
                BLOCK_C=min(TILE, next_power_of_2(x.shape[1])),
                num_warps=4,
            )
    return sums
