"""Symmetric quantisation of a matrix, with one scale per row or group of its columns, or one that is given for all.

    scale = max |x| / QMAX      q = round(clamp(x * (1 / scale), -QMAX, QMAX))      (details in `common/quantize.py`)

Bytes per row in bf16: 3 K + 4, for reading x once; a row longer than `BLOCK_K` of the configuration is read twice, the
second time from the L2 cache, unless its scale is given. About 5 operations per element: memory bandwidth is the lower
bound. 16384 rows of 4096: 201 MB, 47 us at 4.3 TB/s; of 14336: 705 MB, 164 us. With groups a row has 3 K + 4 K / G,
read once: a program quantises some groups of one row.

The launch configuration does not change a bit of the result, so a row's result is the same alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import cdiv, check_float, next_power_of_2
from inflight_kernels.common.quantize import (
    LARGEST,
    check_group_size,
    check_quantized_dtype,
    check_scale,
    inverse_of,
    quantized,
    row_scale,
)
from inflight_kernels.common.rows import groups_of_program, num_programs, row_config, rows_of
from inflight_kernels.tuning import tuned

# Columns held in registers, warps, resident programs per multiprocessor (0: one program per row).
CANDIDATES: tuple[Mapping[str, int], ...] = (
    {"BLOCK_K": 4096, "num_warps": 4, "PROGRAMS_PER_SM": 0},
    {"BLOCK_K": 4096, "num_warps": 8, "PROGRAMS_PER_SM": 0},
    {"BLOCK_K": 16384, "num_warps": 8, "PROGRAMS_PER_SM": 0},
    {"BLOCK_K": 16384, "num_warps": 16, "PROGRAMS_PER_SM": 0},
    {"BLOCK_K": 16384, "num_warps": 16, "PROGRAMS_PER_SM": 3},
)


def default_config(width: int) -> Mapping[str, int]:
    """The launch for rows of `width`. Not measured yet; see `row_config`."""
    block, num_warps = row_config(width)
    return {"BLOCK_K": block, "num_warps": num_warps, "PROGRAMS_PER_SM": 0}


# One compiled kernel for every number of rows: triton would otherwise specialise for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def quantize_per_token_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    num_rows,
    width,
    stride_x,
    given_scale,
    QMAX: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    offs_k = tl.arange(0, BLOCK_K)
    for pid_t in tl.range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row_ptr = x_ptr + tl.cast(pid_t, tl.int64) * stride_x
        out_ptr = q_ptr + tl.cast(pid_t, tl.int64) * width
        if ONE_BLOCK:
            mask = offs_k < width
            x = tl.load(row_ptr + offs_k, mask=mask, other=0.0).to(tl.float32)
            scale = given_scale
            if given_scale is None:
                scale = row_scale(tl.max(tl.abs(x), axis=0), QMAX)
            tl.store(out_ptr + offs_k, quantized(x, inverse_of(scale), dtype, QMAX), mask=mask)
        else:
            scale = given_scale
            if given_scale is None:
                absmax = tl.zeros((BLOCK_K,), tl.float32)
                for start in range(0, width, BLOCK_K):
                    x = tl.load(row_ptr + start + offs_k, mask=start + offs_k < width, other=0.0).to(tl.float32)
                    absmax = tl.maximum(absmax, tl.abs(x))
                scale = row_scale(tl.max(absmax, axis=0), QMAX)
            for start in range(0, width, BLOCK_K):
                mask = start + offs_k < width
                x = tl.load(row_ptr + start + offs_k, mask=mask, other=0.0).to(tl.float32)
                tl.store(out_ptr + start + offs_k, quantized(x, inverse_of(scale), dtype, QMAX), mask=mask)
        tl.store(scale_ptr + pid_t, scale)


@triton.jit
def quantize_groups_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    width,
    num_groups,
    stride_x,
    QMAX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    pid_t = tl.program_id(0).to(tl.int64)
    offs_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_k = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = offs_k < width
    x = tl.load(x_ptr + pid_t * stride_x + offs_k, mask=mask, other=0.0).to(tl.float32)
    scale = row_scale(tl.max(tl.abs(x), axis=1), QMAX)
    q = quantized(x, inverse_of(scale)[:, None], q_ptr.dtype.element_ty, QMAX)
    tl.store(q_ptr + pid_t * width + offs_k, q, mask=mask)
    tl.store(scale_ptr + pid_t * num_groups + offs_g, scale, mask=offs_g < num_groups)


def _launch_groups(rows: Tensor, q: Tensor, scales: Tensor, group_size: int) -> None:
    """`rows` (T, K), `scales` (T, G)."""
    num_rows, width = rows.shape
    num_groups = scales.shape[-1]
    block = groups_of_program(num_groups, group_size)
    quantize_groups_kernel[(num_rows, cdiv(num_groups, block))](
        rows,
        q,
        scales,
        width,
        num_groups,
        rows.stride(0),
        QMAX=LARGEST[q.dtype],
        GROUP=group_size,
        BLOCK_G=block,
        num_warps=4,
    )


def quantize_per_token(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float | None = None,
    group_size: int = 0,
    *,
    config: Mapping[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch quantisation of the rows of `x` (..., K); see `inflight_kernels.quantize_per_token`. `config` is of rows
    without groups."""
    check_float("x", x)
    check_quantized_dtype(dtype, x.device)
    check_scale(scale)
    check_group_size(group_size, scale)
    width = x.shape[-1]
    rows = rows_of(x)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    of_row = (cdiv(width, group_size),) if group_size else ()
    scales = torch.empty((*x.shape[:-1], *of_row), dtype=torch.float32, device=x.device)
    num_rows = rows.shape[0]
    if num_rows and group_size:
        _launch_groups(rows, q, scales, group_size)
    elif num_rows:
        if config is None:
            shape = {"tokens": next_power_of_2(num_rows), "width": next_power_of_2(width), "dtype": str(x.dtype)}
            config = tuned("quantize_per_token", shape, default_config(width), x.device)
        quantize_per_token_kernel[(num_programs(num_rows, config["PROGRAMS_PER_SM"], x.device),)](
            rows,
            q,
            scales,
            num_rows,
            width,
            rows.stride(0),
            scale,
            QMAX=LARGEST[dtype],
            BLOCK_K=config["BLOCK_K"],
            ONE_BLOCK=config["BLOCK_K"] >= width,
            num_warps=config["num_warps"],
        )
    return q, scales
