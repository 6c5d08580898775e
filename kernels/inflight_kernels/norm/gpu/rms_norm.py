"""RMSNorm, alone or fused with the residual addition or the embedding before it, and with the quantisation after it, in
one launch.

    s = round(x + residual)                                     (only with a residual)
    s = table[token id]                                         (only of embeddings)
    y = round(weight * round(s / sqrt(mean(s^2) + eps)))
    q, scale = y quantised with one scale per row or group, or a given one, see `common/quantize.py`   (only quantised)

round() is to the dtype of x; the normalised value is rounded before it is multiplied by the weight, as in Hugging Face
Llama, unless the weight is float32 and x is not, as in Gemma. y is rounded even if only q is kept, so that the fused
and the separate operations give the same bits under the same configuration.

Bytes per row in bf16: 4 H alone, 8 H with a residual; quantised 3 H + 4 and 7 H + 4. About 8 operations per element:
memory bandwidth is the lower bound. 16384 rows of 4096 with a residual: 537 MB, 125 us at 4.3 TB/s; quantised 470 MB,
109 us. 64 rows: 2.1 MB, 0.5 us, so that latency dominates: one read, one reduction, one write.

One program holds a row in registers and reads it once. Nothing in the launch that affects the order of the sum depends
on the number of rows: a row's result is bitwise the same alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import cdiv, check_dtype, check_float, check_shape, check_vector, next_power_of_2
from inflight_kernels.common.quantize import (
    LARGEST,
    check_group_size,
    check_quantized_dtype,
    check_scale,
    inverse_of,
    quantized,
    row_scale,
)
from inflight_kernels.common.rows import num_programs, rows_of
from inflight_kernels.tuning import tuned

# One row must fit into the registers of one program: 16 warps hold 64 elements per thread. The largest hidden size of
# any model known to us is 18432.
MAX_HIDDEN_SIZE = 32768
# Rows per program, its warps, resident programs per multiprocessor (0: one program per tile of rows), and pipeline
# stages of such a resident program: rows in flight.
CANDIDATES: tuple[Mapping[str, int], ...] = (
    {"BLOCK_T": 1, "num_warps": 4, "PROGRAMS_PER_SM": 0, "STAGES": 1},
    {"BLOCK_T": 1, "num_warps": 8, "PROGRAMS_PER_SM": 0, "STAGES": 1},
    {"BLOCK_T": 1, "num_warps": 16, "PROGRAMS_PER_SM": 0, "STAGES": 1},
    {"BLOCK_T": 2, "num_warps": 8, "PROGRAMS_PER_SM": 0, "STAGES": 1},
    {"BLOCK_T": 1, "num_warps": 8, "PROGRAMS_PER_SM": 6, "STAGES": 1},
    {"BLOCK_T": 1, "num_warps": 8, "PROGRAMS_PER_SM": 4, "STAGES": 2},
)


def default_config(hidden_size: int, quantised: bool = False) -> Mapping[str, int]:
    """The launch for rows of `hidden_size`. Not measured yet.

    16 elements per thread: two 16-byte loads of bf16 from each tensor are in flight before the first is needed. With 40
    registers, 6 programs of 4096 elements fit on a multiprocessor: 96 KiB in flight, where 26 KiB would hide 0.8 us of
    latency at 4.3 TB/s. Small rows share a program, so that it still moves a few KiB.

    8 elements per thread if quantised: with more, triton 3.8 stores the bytes in another layout than it loads, and
    converts through shared memory.
    """
    block_h = next_power_of_2(hidden_size)
    block_t = max(1, 2048 // block_h)
    return {
        "BLOCK_T": block_t,
        "num_warps": min(max(block_t * block_h // (256 if quantised else 512), 4), 16 if quantised else 32),
        "PROGRAMS_PER_SM": 0,
        "STAGES": 1,
    }


# One compiled kernel for every number of rows: triton would otherwise specialise for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["token_ids_ptr", "num_rows"])
def rms_norm_kernel(
    x_ptr,
    token_ids_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    scale_ptr,
    sum_ptr,
    num_rows,
    hidden_size,
    stride_x,
    stride_residual,
    eps,
    given_scale,
    QMAX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    dtype = x_ptr.dtype.element_ty
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < hidden_size
    # Asked for before the rows, so that it is there when the reduction is done.
    weight = tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0)
    for pid_t in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_T), tl.num_programs(0), num_stages=STAGES):
        offs_t = tl.cast(pid_t, tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        mask_t = offs_t < num_rows
        mask = mask_t[:, None] & mask_h[None, :]
        offs_out = offs_t[:, None] * hidden_size + offs_h[None, :]

        places = offs_t
        if token_ids_ptr is not None:
            places = tl.load(token_ids_ptr + offs_t, mask=mask_t, other=0)
        x = tl.load(x_ptr + places[:, None] * stride_x + offs_h[None, :], mask=mask, other=0.0)
        if token_ids_ptr is not None:
            tl.store(sum_ptr + offs_out, x, mask=mask)
        s = x.to(tl.float32)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + offs_t[:, None] * stride_residual + offs_h[None, :], mask=mask, other=0.0)
            rounded = (s + residual.to(tl.float32)).to(dtype)
            tl.store(sum_ptr + offs_out, rounded, mask=mask)
            s = rounded.to(tl.float32)

        inverse_rms = tl.rsqrt(tl.sum(s * s, axis=1) / hidden_size + eps)
        normalised = s * inverse_rms[:, None]
        if weight.dtype == dtype:
            normalised = normalised.to(dtype).to(tl.float32)
        y = (normalised * weight.to(tl.float32)[None, :]).to(dtype)
        if scale_ptr is not None:
            y = y.to(tl.float32)
            if GROUP:
                groups = tl.reshape(y, (BLOCK_T, BLOCK_H // GROUP, GROUP))
                scale = row_scale(tl.max(tl.abs(groups), axis=2), QMAX)
                num_groups = tl.cdiv(hidden_size, GROUP)
                offs_g = tl.arange(0, BLOCK_H // GROUP)
                mask_g = mask_t[:, None] & (offs_g < num_groups)[None, :]
                tl.store(scale_ptr + offs_t[:, None] * num_groups + offs_g[None, :], scale, mask=mask_g)
                groups = quantized(groups, inverse_of(scale)[:, :, None], y_ptr.dtype.element_ty, QMAX)
                y = tl.reshape(groups, (BLOCK_T, BLOCK_H))
            else:
                if given_scale is None:
                    scale = row_scale(tl.max(tl.abs(y), axis=1), QMAX)
                else:
                    scale = tl.full((BLOCK_T,), given_scale, tl.float32)
                tl.store(scale_ptr + offs_t, scale, mask=mask_t)
                y = quantized(y, inverse_of(scale)[:, None], y_ptr.dtype.element_ty, QMAX)
        tl.store(y_ptr + offs_out, y, mask=mask)


def _launch(
    operation: str,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    dtype: torch.dtype,
    config: Mapping[str, int] | None,
    token_ids: Tensor | None = None,
    given_scale: float | None = None,
    group_size: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the normalised rows in `dtype`, their scales if it is a quantised type, and with a residual the sum, with
    `token_ids` the rows of `x` that these name."""
    hidden_size = x.shape[-1]
    check_float("x", x)
    check_scale(given_scale)
    check_group_size(group_size, given_scale)
    check_vector("weight", weight, hidden_size, torch.float32 if weight.dtype == torch.float32 else x.dtype)
    if hidden_size > MAX_HIDDEN_SIZE:
        raise ValueError(f"rms_norm holds a row in registers: at most {MAX_HIDDEN_SIZE} elements, got {hidden_size}")
    if residual is not None:
        check_dtype("residual", residual, x.dtype)
        check_shape("residual", residual, tuple(x.shape))
    rows = rows_of(x)
    residual_rows = None if residual is None else rows_of(residual)

    shape_of_y = x.shape if token_ids is None else (len(token_ids), hidden_size)
    y = torch.empty(shape_of_y, dtype=dtype, device=x.device)
    shape_of_scale = (*shape_of_y[:-1], *((cdiv(hidden_size, group_size),) if group_size else ()))
    scale = torch.empty(shape_of_scale, dtype=torch.float32, device=x.device) if dtype in LARGEST else None
    has_sum = residual is not None or token_ids is not None
    total = torch.empty(shape_of_y, dtype=x.dtype, device=x.device) if has_sum else None
    num_rows = rows.shape[0] if token_ids is None else len(token_ids)
    block_h = next_power_of_2(hidden_size)
    if num_rows:
        if config is None:
            # The number of rows is left out, because the order of the sum must not depend on the batch.
            shape = {"hidden_size": block_h, "dtype": str(x.dtype)}
            config = tuned(operation, shape, default_config(hidden_size, dtype in LARGEST), x.device)
        rms_norm_kernel[(num_programs(cdiv(num_rows, config["BLOCK_T"]), config["PROGRAMS_PER_SM"], x.device),)](
            rows,
            token_ids,
            residual_rows,
            weight,
            y,
            scale,
            total,
            num_rows,
            hidden_size,
            rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            eps,
            given_scale,
            QMAX=LARGEST.get(dtype),
            GROUP=min(group_size, block_h),
            BLOCK_T=config["BLOCK_T"],
            BLOCK_H=block_h,
            STAGES=config["STAGES"],
            num_warps=config["num_warps"],
        )
    return y, scale, total


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    config: Mapping[str, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Launch RMSNorm of `x` (..., H); see `inflight_kernels.rms_norm`."""
    y, _, total = _launch("rms_norm", x, weight, eps, residual, x.dtype, config)
    return y if total is None else (y, total)


def _check_table(token_ids: Tensor, table: Tensor) -> None:
    check_vector("token_ids", token_ids, len(token_ids), torch.int64)
    if table.dim() != 2:
        raise ValueError(f"table must be (vocabulary, hidden_size), got {tuple(table.shape)}")


def embedding_rms_norm(
    token_ids: Tensor, table: Tensor, weight: Tensor, eps: float, *, config: Mapping[str, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Launch RMSNorm of rows of `table` (V, H); see `inflight_kernels.embedding_rms_norm`."""
    _check_table(token_ids, table)
    normed, _, embedded = _launch("rms_norm", table, weight, eps, None, table.dtype, config, token_ids)
    assert embedded is not None
    return normed, embedded


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float | None = None,
    group_size: int = 0,
    *,
    config: Mapping[str, int] | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Launch RMSNorm of `x` (..., H) into `dtype`; see `inflight_kernels.rms_norm_quantized`."""
    check_quantized_dtype(dtype, x.device)
    q, scales, total = _launch(
        "rms_norm_quantized", x, weight, eps, residual, dtype, config, given_scale=scale, group_size=group_size
    )
    assert scales is not None
    return (q, scales) if total is None else (q, scales, total)


def embedding_rms_norm_quantized(
    token_ids: Tensor,
    table: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float | None = None,
    group_size: int = 0,
    *,
    config: Mapping[str, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch RMSNorm of rows of `table` (V, H) into `dtype`; see `inflight_kernels.embedding_rms_norm_quantized`."""
    _check_table(token_ids, table)
    check_quantized_dtype(dtype, table.device)
    q, scales, embedded = _launch(
        "rms_norm_quantized", table, weight, eps, None, dtype, config, token_ids, scale, group_size
    )
    assert scales is not None and embedded is not None
    return q, scales, embedded
