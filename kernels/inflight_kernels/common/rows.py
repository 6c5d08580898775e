"""Code shared by operations on whole rows: a tensor as a matrix of rows, and the number of programs to launch.

Knows no formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.common.checks import multiprocessor_count, next_power_of_2


def rows_of(x: Tensor) -> Tensor:
    """`x` (..., H) as (rows, H) with contiguous rows; a copy only if no such view exists."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def num_programs(num_tiles: int, programs_per_sm: int, device: torch.device) -> int:
    """Programs for `num_tiles` tiles: with `programs_per_sm` 0 one per tile; else at most so many per multiprocessor,
    and each of n programs processes every n-th tile."""
    if programs_per_sm == 0:
        return num_tiles
    return min(num_tiles, programs_per_sm * multiprocessor_count(device))


def groups_of_program(num_groups: int, group_size: int) -> int:
    """Groups of one row that a program of four warps quantises, a power of two: of up to 4096 elements, so that the 32
    of each thread are four loads of 16 bytes of bf16. Not measured yet."""
    return min(next_power_of_2(num_groups), max(4096 // group_size, 1))


def row_config(width: int) -> tuple[int, int]:
    """Columns in registers, and warps, for a kernel that needs a whole row before it writes any. Not measured yet.

    A row of up to 16384 columns is read once: 16 warps hold 32 elements per thread, and with 61 registers (gated,
    sm_90) two such programs fit on a multiprocessor, with 2 x 57 KiB in flight at 14336 gated columns of bf16. A longer
    row is read twice. Fewer warps for shorter rows: 16 elements per thread are two 16-byte loads of bf16.
    """
    block = min(next_power_of_2(width), 16384)
    return block, min(max(block // 512, 4), 16)
