"""RMSNorm, alone or fused with the residual addition before it.

    s = round(x + residual)                                     (only with a residual)
    y = round(weight * round(s / sqrt(mean(s^2) + eps)))

round() is to the dtype of x; the normalised value is rounded before it meets the weight, as Hugging Face Llama does.
Bytes per row: 2 H with no residual, 4 H with one, times the size of the dtype; memory is the floor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.ops._checks import cdiv, check_dtype, check_float, check_shape, next_power_of_2

# Elements one program holds. Small rows are packed up to it so that a program still moves a few KiB. Not measured yet.
TILE_ELEMENTS = 2048
# One row must fit into the registers of one program.
MAX_HIDDEN_SIZE = 32768


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    num_rows,
    hidden_size,
    stride_x,
    stride_residual,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    pid_t = tl.program_id(0).to(tl.int64)
    offs_t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < hidden_size
    mask = (offs_t < num_rows)[:, None] & mask_h[None, :]
    dtype = y_ptr.dtype.element_ty

    s = tl.load(x_ptr + offs_t[:, None] * stride_x + offs_h[None, :], mask=mask, other=0.0).to(tl.float32)
    offs_out = offs_t[:, None] * hidden_size + offs_h[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offs_t[:, None] * stride_residual + offs_h[None, :], mask=mask, other=0.0)
        rounded = (s + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + offs_out, rounded, mask=mask)
        s = rounded.to(tl.float32)

    inverse_rms = tl.rsqrt(tl.sum(s * s, axis=1) / hidden_size + eps)
    normalised = (s * inverse_rms[:, None]).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs_out, (normalised * weight[None, :]).to(dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Launch RMSNorm of `x` (..., H); see `inflight_kernels.rms_norm`."""
    hidden_size = x.shape[-1]
    check_float("x", x)
    check_dtype("weight", weight, x.dtype)
    check_shape("weight", weight, (hidden_size,))
    if hidden_size > MAX_HIDDEN_SIZE:
        raise ValueError(f"rms_norm holds a row in registers: at most {MAX_HIDDEN_SIZE} elements, got {hidden_size}")
    rows = x.reshape(-1, hidden_size)
    residual_rows = rows
    if residual is not None:
        check_dtype("residual", residual, x.dtype)
        check_shape("residual", residual, tuple(x.shape))
        residual_rows = residual.reshape(-1, hidden_size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if residual_rows.stride(-1) != 1:
        residual_rows = residual_rows.contiguous()

    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y) if residual is not None else y
    num_rows = rows.shape[0]
    if num_rows:
        block_h = next_power_of_2(hidden_size)
        block_t = max(1, TILE_ELEMENTS // block_h)
        rms_norm_kernel[(cdiv(num_rows, block_t),)](
            rows,
            residual_rows,
            weight,
            y,
            total,
            num_rows,
            hidden_size,
            rows.stride(0),
            residual_rows.stride(0),
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK_T=block_t,
            BLOCK_H=block_h,
            # About 8 to 16 elements a thread, which is 16 bytes a load for bf16. Not measured yet.
            num_warps=min(max(block_t * block_h // 512, 4), 16),
        )
    if residual is None:
        return y.view(x.shape)
    return y.view(x.shape), total.view(x.shape)
