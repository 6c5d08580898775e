"""A short convolution of each channel over its sequence's tokens, with the last inputs as the state.

    y_t = round(f(bias + sum over w of weight[w] * x_{t - W + 1 + w})),   x_t = 0 before position 0

Bytes per token of C channels in bf16: 4 C, and per sequence 4 (W - 1) C of state. Up to about 15 operations per
element: memory bandwidth is the lower bound. 8192 channels and 4 taps: 8k tokens of one sequence are 268 MB, 62 us at
4.3 TB/s; 64 sequences of one token are 10.5 MB, 2.4 us.

One program has some channels of one sequence and goes over its tokens, a block of them at a time. Only it reads the
sequence's state, so it can write it over when all its tokens are computed. An element is computed alike wherever its
block begins: the launch configuration does not change a bit of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.common.activations import activated
from inflight_kernels.common.checks import (
    cdiv,
    check_float,
    check_shape,
    check_unit_stride,
    next_power_of_2,
)
from inflight_kernels.recurrent.gpu._sequences import check_sequences, check_state
from inflight_kernels.recurrent.step_sequences import StepSequences

# 64 channels of bf16 are a cache line, and more programs than these would not be busy with one sequence. Not measured
# yet.
BLOCK_C, BLOCK_T = 64, 32


@triton.jit
def causal_conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    y_ptr,
    slots_ptr,
    starts_ptr,
    positions_ptr,
    kept_ptr,
    num_channels,
    stride_x,
    TAPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # Neighbouring programs take neighbouring channels.
    num_blocks = tl.cdiv(num_channels, BLOCK_C)
    pid_b = tl.program_id(0) // num_blocks
    offs_c = (tl.program_id(0) % num_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < num_channels
    start = tl.load(starts_ptr + pid_b).to(tl.int64)
    num_tokens = tl.load(starts_ptr + pid_b + 1) - start
    # What an earlier owner left is not read, for it may be no number.
    is_used = tl.load(positions_ptr + start) > 0
    size = (TAPS - 1) * num_channels
    own_ptr = state_ptr + tl.load(slots_ptr + pid_b) * size + offs_c[None, :]
    rows_ptr = x_ptr + start * stride_x + offs_c[None, :]
    for first in range(0, num_tokens, BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        mask_t = offs_t < num_tokens
        total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            source = offs_t + (tap + 1 - TAPS)
            mask = (mask_t & (source >= 0))[:, None] & mask_c[None, :]
            x = tl.load(rows_ptr + source.to(tl.int64)[:, None] * stride_x, mask=mask, other=0.0)
            if tap < TAPS - 1:
                before = (mask_t & (source < 0) & is_used)[:, None] & mask_c[None, :]
                old = tl.load(own_ptr + (offs_t + tap)[:, None] * num_channels, mask=before, other=0.0)
                x = tl.where(source[:, None] < 0, old, x)
            weight = tl.load(weight_ptr + offs_c * TAPS + tap, mask=mask_c, other=0.0).to(tl.float32)
            total += x.to(tl.float32) * weight[None, :]
        if ACTIVATION is not None:
            total = activated(total, ACTIVATION)
        y_rows = y_ptr + (start + offs_t)[:, None] * num_channels + offs_c[None, :]
        tl.store(y_rows, total.to(y_ptr.dtype.element_ty), mask=mask_t[:, None] & mask_c[None, :])
        if kept_ptr is not None:
            kept = tl.load(kept_ptr + start + offs_t, mask=mask_t, other=-1).to(tl.int64)
            mask_kept = (kept >= 0)[:, None] & mask_c[None, :]
            for row in tl.static_range(TAPS - 1):
                source = offs_t + (row + 2 - TAPS)
                mask = mask_kept & (source >= 0)[:, None]
                x = tl.load(rows_ptr + source.to(tl.int64)[:, None] * stride_x, mask=mask, other=0.0)
                before = mask_kept & ((source < 0) & is_used)[:, None]
                old = tl.load(own_ptr + (offs_t + row + 1)[:, None] * num_channels, mask=before, other=0.0)
                kept_rows = state_ptr + kept[:, None] * size + row * num_channels + offs_c[None, :]
                tl.store(kept_rows, tl.where(source[:, None] < 0, old, x), mask=mask_kept)
    if TAPS > 1:
        offs_r = tl.arange(0, BLOCK_R)
        mask_r = (offs_r < TAPS - 1)[:, None] & mask_c[None, :]
        source = num_tokens + offs_r + (1 - TAPS)
        x = tl.load(rows_ptr + source[:, None] * stride_x, mask=mask_r & (source >= 0)[:, None], other=0.0)
        before = mask_r & ((source < 0) & is_used)[:, None]
        old = tl.load(own_ptr + (num_tokens + offs_r)[:, None] * num_channels, mask=before, other=0.0)
        # All threads have read what is written over now.
        tl.debug_barrier()
        tl.store(own_ptr + offs_r[:, None] * num_channels, tl.where(source[:, None] < 0, old, x), mask=mask_r)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    sequences: StepSequences,
    activation: Activation | None = None,
) -> Tensor:
    """Launch the convolution of `x` (T, C); see `inflight_kernels.causal_conv`."""
    check_float("x", x)
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(
            f"x must be (num_tokens, channels) and weight (channels, taps), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    num_tokens, num_channels = x.shape
    num_taps = weight.shape[1]
    check_shape("weight", weight, (num_channels, num_taps))
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dtype not in (x.dtype, torch.float32) or not tensor.is_contiguous()):
            raise ValueError(f"{name} must be contiguous, {x.dtype} or float32, got {tensor.dtype}")
    if bias is not None:
        check_shape("bias", bias, (num_channels,))
    check_unit_stride("x", x)
    check_state("state", state, (num_taps - 1, num_channels), x.dtype)
    num_sequences = check_sequences(sequences, num_tokens)
    y = torch.empty((num_tokens, num_channels), dtype=x.dtype, device=x.device)
    if y.numel():
        block_c = min(BLOCK_C, next_power_of_2(num_channels))
        causal_conv_kernel[(num_sequences * cdiv(num_channels, block_c),)](
            x,
            weight,
            bias,
            state,
            y,
            sequences.slots_B,
            sequences.starts,
            sequences.positions_T,
            sequences.kept_T,
            num_channels,
            x.stride(0),
            TAPS=num_taps,
            ACTIVATION=None if activation is None else activation.value,
            # No more than two, so that nothing is compiled while serving.
            BLOCK_T=1 if num_tokens == num_sequences else BLOCK_T,
            BLOCK_C=block_c,
            BLOCK_R=next_power_of_2(num_taps - 1),
            num_warps=4,
        )
    return y
