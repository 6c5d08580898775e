"""A soft cap, as of Gemma 2's logits.

    y = round(cap * tanh(x / cap)),   tanh(u) = 1 - 2 / (exp(2 u) + 1)

Bytes per row in bf16: 4 I. Memory bandwidth is the lower bound: 64 rows of 256000 logits are 65.5 MB, 15 us at 4.3
TB/s. torch's five operations move 9 times as many bytes, because they write float32.

An element's result depends on that element alone. Its absolute error is a few cap * 2^-23.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import cdiv, check_float, check_unit_stride, next_power_of_2

# 16 elements for each of 128 threads: two 16-byte loads of bf16 in flight. Not measured yet.
BLOCK_I = 2048


@triton.jit
def soft_cap_kernel(x_ptr, y_ptr, width, stride_x, cap, twice_inverse_cap, BLOCK_I: tl.constexpr):
    # Neighbouring programs take neighbouring columns.
    num_blocks = tl.cdiv(width, BLOCK_I)
    pid_t = (tl.program_id(0) // num_blocks).to(tl.int64)
    offs_i = (tl.program_id(0) % num_blocks) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = offs_i < width
    x = tl.load(x_ptr + pid_t * stride_x + offs_i, mask=mask, other=0.0).to(tl.float32)
    y = tl.fma(1.0 / (tl.exp(x * twice_inverse_cap) + 1.0), -2.0, 1.0) * cap
    tl.store(y_ptr + pid_t * width + offs_i, y.to(y_ptr.dtype.element_ty), mask=mask)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Launch the cap of `x` (T, I); see `inflight_kernels.soft_cap`."""
    check_float("x", x)
    if x.dim() != 2:
        raise ValueError(f"x must be (num_tokens, width), got {tuple(x.shape)}")
    if not cap > 0.0:
        raise ValueError(f"cap must be positive, got {cap}")
    check_unit_stride("x", x)
    num_tokens, width = x.shape
    y = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if y.numel():
        block_i = min(BLOCK_I, next_power_of_2(width))
        soft_cap_kernel[(num_tokens * cdiv(width, block_i),)](
            x, y, width, x.stride(0), float(cap), 2.0 / cap, BLOCK_I=block_i, num_warps=4
        )
    return y
