"""The recurrence of a state space with one decay a head (Mamba-2), a chunk of C tokens at a time.

    s = clamp(softplus(dt + dt_bias), limits)
    S = exp(-exp(a_log) * s) * S + (s * x) b
    y = round(S c + d * x)

Let D[i, j] be the product of the decays behind token j up to token i of a chunk, and D[i] that up to token i, and S the
state before the chunk (arXiv 2405.21060, section 6):

    y[i] = D[i] S c[i] + sum over j <= i of D[i, j] (c[i] b[j]) s[j] x[j] + d x[i]
    S = D[C - 1] S + sum over j of D[C - 1, j] s[j] x[j] b[j]

Bytes per sequence of H heads: 4 H P N of state, as many where a chunk is completed, and per token in bf16
4 H P + 4 G N + 2 H; of the earlier tokens of an incomplete chunk, and for keeping new ones, 2 H (P + N) each. Decodes
are bound by memory bandwidth: 64 sequences of 128 heads of 64 x 128 have 268 MB of state, and with a completed chunk in
16 and 7.5 tokens kept on average 312 MB, 73 us at 4.3 TB/s. Of operations a chunk has 4 H C P N in products with the
state, half of them where it is completed, and 2 H C C (P + N) among its tokens. A prompt is bound by the latency of its
chunks, one after the other.

One program has one head of one sequence and goes over its chunks; nobody else reads or writes what is kept of it. It
multiplies some columns of the state at a time, which are cached behind a prompt's first chunk. See `_chunks.py` for why
no bit depends on a step's borders.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.activations import softplus
from inflight_kernels.common.checks import (
    check_dtype,
    check_float,
    check_shape,
    check_unit_stride,
    check_vector,
    next_power_of_2,
)
from inflight_kernels.recurrent.chunk import CHUNK, chunk_shape
from inflight_kernels.recurrent.gpu._chunks import (
    MIN_BLOCK,
    chunk_numbers,
    chunk_rows,
    copy_state,
    decays_between,
    decays_to_end,
    keep_rows,
    product,
)
from inflight_kernels.recurrent.gpu._sequences import check_chunk, check_sequences, check_state
from inflight_kernels.recurrent.step_sequences import StepSequences
from inflight_kernels.tuning import tuned

# Columns of a state that are multiplied at once; those of 64 rows are in 16, 8 or 16 registers. Not measured yet.
CANDIDATES: list[dict[str, int]] = [
    {"BLOCK_N": 32, "num_warps": 4},
    {"BLOCK_N": 16, "num_warps": 4},
    {"BLOCK_N": 64, "num_warps": 8},
]


def default_config() -> dict[str, int]:
    """Not measured yet."""
    return CANDIDATES[0]


@triton.jit
def keep_inputs(
    x_ptr,
    stride_x,
    b_ptr,
    stride_b,
    dt_ptr,
    stride_dt,
    kept_ptr,
    to_ptr,
    first,
    start,
    end,
    is_kept,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ALL_N: tl.constexpr,
):
    """Write a head's inputs of the tokens that `is_kept` (C) names; see `keep_rows`."""
    keep_rows(x_ptr, stride_x, kept_ptr, to_ptr, WIDTH, first, start, end, is_kept, HEAD_DIM, BLOCK_P, CHUNK)
    at: tl.constexpr = HEAD_DIM
    keep_rows(b_ptr, stride_b, kept_ptr + at, to_ptr + at, WIDTH, first, start, end, is_kept, STATE_DIM, ALL_N, CHUNK)
    at_dt: tl.constexpr = at + STATE_DIM
    keep_rows(dt_ptr, stride_dt, kept_ptr + at_dt, to_ptr + at_dt, WIDTH, first, start, end, is_kept, 1, 1, CHUNK)


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
    chunk_ptr,
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
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ALL_N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Neighbouring programs take neighbouring heads.
    head, pid_b = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads
    offs_t, offs_p = tl.arange(0, CHUNK), tl.arange(0, BLOCK_P)
    mask_p = offs_p < HEAD_DIM
    start, end = tl.load(starts_ptr + pid_b), tl.load(starts_ptr + pid_b + 1)
    position, slot = tl.load(positions_ptr + start), tl.load(slots_ptr + pid_b)
    size = num_heads.to(tl.int64) * (HEAD_DIM * STATE_DIM)
    states_ptr = state_ptr + head * (HEAD_DIM * STATE_DIM)
    own_ptr = states_ptr + slot * size
    # Of a token: x, b, dt.
    chunk_size = num_heads.to(tl.int64) * ((CHUNK - 1) * WIDTH)
    chunks_ptr = chunk_ptr + head * ((CHUNK - 1) * WIDTH)
    own_rows = chunks_ptr + slot * chunk_size
    group = head // heads_of_group * STATE_DIM
    x_ptr, b_ptr, c_ptr, dt_ptr = x_ptr + head * HEAD_DIM, b_ptr + group, c_ptr + group, dt_ptr + head
    rate = -tl.exp(tl.load(a_log_ptr + head))
    bias, through = tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
    for first in range(start - (position % CHUNK).to(tl.int32), end, CHUNK):
        token = first + offs_t
        # The state before the first chunk of a sequence is not read: what an earlier owner left may be no number.
        is_used, is_new = position + (first - start) > 0, (token >= start) & (token < end)
        xs = chunk_rows(
            x_ptr + offs_p[None, :], stride_x, own_rows + offs_p[None, :], WIDTH,
            first, start, end, mask_p, CHUNK,
        )  # fmt: skip
        dt = chunk_numbers(dt_ptr, stride_dt, own_rows + (HEAD_DIM + STATE_DIM), WIDTH, first, start, end, CHUNK)
        step = tl.clamp(softplus(dt.to(tl.float32) + bias), least, most, propagate_nan=tl.PropagateNan.ALL)
        step = tl.where(token < end, step, 0.0)
        log_decay, x = rate * step, xs.to(tl.float32)
        brought, to_row = x * step[:, None], tl.exp(tl.cumsum(log_decay, axis=0))[:, None]

        among = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        y = tl.zeros((CHUNK, BLOCK_P), dtype=tl.float32)
        for part in range(0, STATE_DIM, BLOCK_N):
            offs = part + tl.arange(0, BLOCK_N)
            mask = offs < STATE_DIM
            state = tl.load(
                own_ptr + offs_p[:, None] * STATE_DIM + offs[None, :],
                mask=mask_p[:, None] & mask[None, :] & is_used,
                other=0.0,
            )
            b = chunk_rows(
                b_ptr + offs[None, :], stride_b, own_rows + (HEAD_DIM + offs)[None, :], WIDTH,
                first, start, end, mask, CHUNK,
            )  # fmt: skip
            c_rows = c_ptr + token.to(tl.int64)[:, None] * stride_c + offs[None, :]
            c = tl.load(c_rows, mask=is_new[:, None] & mask[None, :], other=0.0).to(tl.float32)
            among += product(c, b.to(tl.float32).T)
            y += product(c * to_row, state.T)
        shares = tl.where(offs_t[:, None] >= offs_t[None, :], among * decays_between(log_decay), 0.0)
        y += product(shares, brought) + through * x
        y_rows = y_ptr + (token.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM
        tl.store(y_rows + offs_p[None, :], y.to(y_ptr.dtype.element_ty), mask=is_new[:, None] & mask_p[None, :])

        if kept_ptr is not None:
            for place in range(tl.maximum(start - first, 0), tl.minimum(end - first, CHUNK - 1)):
                kept = tl.load(kept_ptr + first + place).to(tl.int64)
                if kept >= 0:
                    copy_state(own_ptr, states_ptr + kept * size, is_used, HEAD_DIM * STATE_DIM)
                    keep_inputs(
                        x_ptr, stride_x, b_ptr, stride_b, dt_ptr, stride_dt, own_rows,
                        chunks_ptr + kept * chunk_size, first, start, end, offs_t <= place,
                        HEAD_DIM, STATE_DIM, CHUNK, WIDTH, BLOCK_P, ALL_N,
                    )  # fmt: skip
        # All threads have read what is written over now.
        tl.debug_barrier()
        if first + CHUNK <= end:
            of_chunk, left = tl.exp(tl.sum(log_decay, axis=0)), (brought * decays_to_end(log_decay)[:, None]).T
            for part in range(0, STATE_DIM, BLOCK_N):
                offs = part + tl.arange(0, BLOCK_N)
                mask = offs < STATE_DIM
                b = chunk_rows(
                    b_ptr + offs[None, :], stride_b, own_rows + (HEAD_DIM + offs)[None, :], WIDTH,
                    first, start, end, mask, CHUNK,
                )  # fmt: skip
                part_ptr = own_ptr + offs_p[:, None] * STATE_DIM + offs[None, :]
                mask = mask_p[:, None] & mask[None, :]
                state = of_chunk * tl.load(part_ptr, mask=mask & is_used, other=0.0)
                tl.store(part_ptr, state + product(left, b.to(tl.float32)), mask=mask)
            # All threads see the whole state now.
            tl.debug_barrier()
            if kept_ptr is not None:
                kept = tl.load(kept_ptr + first + CHUNK - 1).to(tl.int64)
                if kept >= 0:
                    copy_state(own_ptr, states_ptr + kept * size, True, HEAD_DIM * STATE_DIM)
        else:
            keep_inputs(
                x_ptr, stride_x, b_ptr, stride_b, dt_ptr, stride_dt, own_rows,
                own_rows, first, start, end, is_new,
                HEAD_DIM, STATE_DIM, CHUNK, WIDTH, BLOCK_P, ALL_N,
            )  # fmt: skip


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
    chunk: Tensor | None = None,
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
    check_state("state", state, (num_heads, head_dim, state_dim), torch.float32)
    chunk_of_slot = chunk_shape(x, num_heads, head_dim + state_dim + 1)
    chunk = check_chunk(chunk, state, chunk_of_slot, x.dtype)
    num_sequences = check_sequences(sequences, num_tokens)
    y = torch.empty((num_tokens, num_heads * head_dim), dtype=x.dtype, device=x.device)
    if y.numel():
        if config is None:
            # The batch is left out, because the order of the sums must not depend on it.
            shape: dict[str, int | str] = {"head_dim": head_dim, "state_dim": state_dim, "dtype": str(x.dtype)}
            config = tuned("state_space_scan", shape, default_config(), x.device)
        state_space_scan_kernel[(num_sequences * num_heads,)](
            x,
            b,
            c,
            dt,
            a_log,
            d,
            dt_bias,
            state,
            chunk,
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
            CHUNK=CHUNK,
            WIDTH=chunk_of_slot[2],
            BLOCK_P=max(next_power_of_2(head_dim), MIN_BLOCK),
            ALL_N=max(next_power_of_2(state_dim), MIN_BLOCK),
            BLOCK_N=config["BLOCK_N"],
            num_warps=config["num_warps"],
        )
    return y
