"""The recurrence of a state space with one decay a head (Mamba-2), token by token.

    s = clamp(softplus(dt + dt_bias), limits)
    S = exp(-exp(a_log) * s) * S + (s * x) b
    y = round(S c + d * x)

Bytes per sequence of H heads: 8 H P N of state, and per token in bf16 4 H P + 4 G N + 2 H. Operations per token:
5 H P N. Decodes are bound by memory bandwidth: 64 sequences of 128 heads of 64 x 128 are 537 MB, 125 us at 4.3 TB/s. A
prompt is bound by the latency of its tokens, one after the other.

One program has some rows of one head's state of one sequence, in registers, and goes over the sequence's tokens. The
rows do not depend on each other. What is computed of a token does not depend on where the step's chunk begins, nor on
any other sequence: its result is bitwise the same in every chunking and batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.activations import softplus
from inflight_kernels.common.checks import (
    cdiv,
    check_dtype,
    check_float,
    check_shape,
    check_unit_stride,
    check_vector,
    next_power_of_2,
)
from inflight_kernels.recurrent.gpu._sequences import check_sequences, check_state
from inflight_kernels.recurrent.step_sequences import StepSequences
from inflight_kernels.tuning import tuned

# Each thread's part of a state of 128 columns in 32, 32 or 64 registers. Not measured yet.
CANDIDATES: list[dict[str, int]] = [
    {"BLOCK_P": 8, "num_warps": 1},
    {"BLOCK_P": 32, "num_warps": 4},
    {"BLOCK_P": 16, "num_warps": 1},
]


def default_config() -> dict[str, int]:
    """Many small programs: a sequence alone is 1024 of them with 128 heads of 64 rows. Not measured yet."""
    return CANDIDATES[0]


@triton.jit
def state_space_scan_kernel(
    x_ptr,
    b_ptr,
    c_ptr,
    dt_ptr,
    a_log_ptr,
    d_ptr,
    dt_bias_ptr,
    state_ptr,
    y_ptr,
    slots_ptr,
    starts_ptr,
    positions_ptr,
    kept_ptr,
    num_heads,
    heads_of_group,
    least,
    most,
    stride_x,
    stride_b,
    stride_c,
    stride_dt,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Neighbouring programs take neighbouring rows.
    num_blocks: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    block, head = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks % num_heads
    pid_b = tl.program_id(0) // num_blocks // num_heads
    offs_p, offs_n = block * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    mask_p, mask_n = offs_p < HEAD_DIM, offs_n < STATE_DIM
    mask = mask_p[:, None] & mask_n[None, :]
    size = num_heads.to(tl.int64) * HEAD_DIM * STATE_DIM
    offs_state = (head * HEAD_DIM + offs_p)[:, None] * STATE_DIM + offs_n[None, :]
    start, end = tl.load(starts_ptr + pid_b), tl.load(starts_ptr + pid_b + 1)
    # What an earlier owner left is not read, for it may be no number.
    is_used = tl.load(positions_ptr + start) > 0
    own_ptr = state_ptr + tl.load(slots_ptr + pid_b) * size + offs_state
    state = tl.load(own_ptr, mask=mask & is_used, other=0.0)

    offs_x = head * HEAD_DIM + offs_p
    offs_group = head // heads_of_group * STATE_DIM + offs_n
    rate = -tl.exp(tl.load(a_log_ptr + head))
    bias, through = tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
    for number in range(start, end):
        token = tl.cast(number, tl.int64)
        x = tl.load(x_ptr + token * stride_x + offs_x, mask=mask_p, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + token * stride_b + offs_group, mask=mask_n, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * stride_c + offs_group, mask=mask_n, other=0.0).to(tl.float32)
        growth = softplus(tl.load(dt_ptr + token * stride_dt + head).to(tl.float32) + bias)
        step = tl.clamp(growth, least, most, propagate_nan=tl.PropagateNan.ALL)
        state = state * tl.exp(rate * step) + (step * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], axis=1) + through * x
        y_row = y_ptr + token * (num_heads * HEAD_DIM)
        tl.store(y_row + offs_x, y.to(y_ptr.dtype.element_ty), mask=mask_p)
        if kept_ptr is not None:
            kept = tl.load(kept_ptr + token)
            if kept >= 0:
                tl.store(state_ptr + kept.to(tl.int64) * size + offs_state, state, mask=mask)
    # All threads have read what is written over now.
    tl.debug_barrier()
    tl.store(own_ptr, state, mask=mask)


def state_space_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    sequences: StepSequences,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    *,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch the recurrence over `x` (T, H * P); see `inflight_kernels.state_space_scan`."""
    check_float("x", x)
    if x.dim() != 2 or b.dim() != 2 or state.dim() != 4:
        raise ValueError(
            f"x and b must be (num_tokens, columns) and state (slots, heads, head_dim, state_dim), got "
            f"{tuple(x.shape)}, {tuple(b.shape)} and {tuple(state.shape)}"
        )
    num_tokens, (_, num_heads, head_dim, state_dim) = x.shape[0], state.shape
    num_groups, rest = divmod(b.shape[1], state_dim)
    if rest or num_groups < 1 or num_heads % num_groups:
        raise ValueError(f"b has {b.shape[1]} columns, which are not groups of {state_dim} for {num_heads} heads")
    check_shape("x", x, (num_tokens, num_heads * head_dim))
    check_shape("b", b, (num_tokens, num_groups * state_dim))
    check_shape("c", c, tuple(b.shape))
    check_shape("dt", dt, (num_tokens, num_heads))
    for name, tensor in (("x", x), ("b", b), ("c", c), ("dt", dt)):
        check_dtype(name, tensor, x.dtype)
        check_unit_stride(name, tensor)
    for name, tensor in (("a_log", a_log), ("d", d), ("dt_bias", dt_bias)):
        check_vector(name, tensor, num_heads, torch.float32)
    check_state(state, (num_heads, head_dim, state_dim), torch.float32)
    num_sequences = check_sequences(sequences, num_tokens)
    y = torch.empty((num_tokens, num_heads * head_dim), dtype=x.dtype, device=x.device)
    if y.numel():
        if config is None:
            # The batch is left out, because the order of the sums must not depend on it.
            shape: dict[str, int | str] = {"head_dim": head_dim, "state_dim": state_dim, "dtype": str(x.dtype)}
            config = tuned("state_space_scan", shape, default_config(), x.device)
        block_p = min(config["BLOCK_P"], next_power_of_2(head_dim))
        state_space_scan_kernel[(num_sequences * num_heads * cdiv(head_dim, block_p),)](
            x,
            b,
            c,
            dt,
            a_log,
            d,
            dt_bias,
            state,
            y,
            sequences.slots_B,
            sequences.starts,
            sequences.positions_T,
            sequences.kept_T,
            num_heads,
            num_heads // num_groups,
            *dt_limits,
            x.stride(0),
            b.stride(0),
            c.stride(0),
            dt.stride(0),
            HEAD_DIM=head_dim,
            STATE_DIM=state_dim,
            BLOCK_P=block_p,
            BLOCK_N=next_power_of_2(state_dim),
            num_warps=config["num_warps"],
        )
    return y
