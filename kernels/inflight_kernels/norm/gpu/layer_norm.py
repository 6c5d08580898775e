"""LayerNorm, alone or fused with the residual addition before it, in one launch.

    s = round(x + residual)                                     (only with a residual)
    c = s - mean(s)
    y = round(weight * c / sqrt(mean(c^2) + eps) + bias)

round() is to the dtype of x. Bytes per row in bf16: 4 H alone, 8 H with a residual. About 9 operations per element:
memory bandwidth is the lower bound. 16384 rows of 4096 with a residual: 537 MB, 125 us at 4.3 TB/s.

One program holds a row in registers and reads it once. Nothing in the launch that affects the order of the sums depends
on the number of rows: a row's result is bitwise the same alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import cdiv, check_dtype, check_float, check_shape, check_vector, next_power_of_2
from inflight_kernels.common.rows import num_programs, rows_of
from inflight_kernels.norm.gpu.rms_norm import MAX_HIDDEN_SIZE, default_config
from inflight_kernels.tuning import tuned


# One compiled kernel for every number of rows: triton would otherwise specialise for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    num_rows,
    hidden_size,
    stride_x,
    stride_residual,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    dtype = x_ptr.dtype.element_ty
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < hidden_size
    # Asked for before the rows, so that they are there when the reductions are done.
    weight = tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_h, mask=mask_h, other=0.0)
    for pid_t in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_T), tl.num_programs(0), num_stages=STAGES):
        offs_t = tl.cast(pid_t, tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        mask = (offs_t < num_rows)[:, None] & mask_h[None, :]
        offs_out = offs_t[:, None] * hidden_size + offs_h[None, :]
        s = tl.load(x_ptr + offs_t[:, None] * stride_x + offs_h[None, :], mask=mask, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + offs_t[:, None] * stride_residual + offs_h[None, :], mask=mask, other=0.0)
            rounded = (s + residual.to(tl.float32)).to(dtype)
            tl.store(sum_ptr + offs_out, rounded, mask=mask)
            s = rounded.to(tl.float32)

        mean = tl.sum(s, axis=1) / hidden_size
        centred = tl.where(mask_h[None, :], s - mean[:, None], 0.0)
        inverse_deviation = tl.rsqrt(tl.sum(centred * centred, axis=1) / hidden_size + eps)
        y = centred * inverse_deviation[:, None] * weight.to(tl.float32)[None, :]
        if bias_ptr is not None:
            y += bias.to(tl.float32)[None, :]
        tl.store(y_ptr + offs_out, y.to(dtype), mask=mask)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    *,
    config: Mapping[str, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Launch LayerNorm of `x` (..., H); see `inflight_kernels.layer_norm`."""
    hidden_size = x.shape[-1]
    check_float("x", x)
    check_vector("weight", weight, hidden_size, x.dtype)
    if bias is not None:
        check_vector("bias", bias, hidden_size, x.dtype)
    if hidden_size > MAX_HIDDEN_SIZE:
        raise ValueError(f"layer_norm holds a row in registers: at most {MAX_HIDDEN_SIZE} elements, got {hidden_size}")
    if residual is not None:
        check_dtype("residual", residual, x.dtype)
        check_shape("residual", residual, tuple(x.shape))
    rows = rows_of(x)
    residual_rows = None if residual is None else rows_of(residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, block_h = rows.shape[0], next_power_of_2(hidden_size)
    if num_rows:
        if config is None:
            # The number of rows is left out, because the order of the sums must not depend on the batch.
            shape = {"hidden_size": block_h, "dtype": str(x.dtype)}
            config = tuned("layer_norm", shape, default_config(hidden_size), x.device)
        layer_norm_kernel[(num_programs(cdiv(num_rows, config["BLOCK_T"]), config["PROGRAMS_PER_SM"], x.device),)](
            rows,
            residual_rows,
            weight,
            bias,
            y,
            total,
            num_rows,
            hidden_size,
            rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            eps,
            BLOCK_T=config["BLOCK_T"],
            BLOCK_H=block_h,
            STAGES=config["STAGES"],
            num_warps=config["num_warps"],
        )
    return y if total is None else (y, total)
