"""The gated delta rule of linear attention, token by token.

    S = exp(-exp(a_log) * softplus(a + dt_bias)) * S
    S = S + k (v - k S) * sigmoid(b)
    out = round(q S),   k = key / |key|,   q = query / |query| / sqrt(Dk)

Bytes per sequence of V value heads: 8 V Dk Dv of state, and per token in bf16 2 (2 K Dk + 2 V Dv) and 4 V. Operations
per token: 8 V Dk Dv. Decodes are bound by memory bandwidth: 64 sequences of 32 heads of 128 x 128 are 268 MB, 62 us at
4.3 TB/s. A prompt is bound by the latency of its tokens, one after the other: of a token, two sums over Dk rows.

One program has some columns of one value head's state of one sequence, in registers, and goes over the sequence's
tokens. The columns do not depend on each other. What is computed of a token does not depend on where the step's chunk
begins, nor on any other sequence: its result is bitwise the same in every chunking and batch.
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

# Each thread's part of a state of 128 rows in 32, 32 or 64 registers. Not measured yet.
CANDIDATES: list[dict[str, int]] = [
    {"BLOCK_V": 8, "num_warps": 1},
    {"BLOCK_V": 16, "num_warps": 1},
    {"BLOCK_V": 32, "num_warps": 4},
]


def default_config() -> dict[str, int]:
    """Many small programs: a sequence alone is 512 of Qwen3-Next's, so that they fill a device, and a sum over the rows
    of a state needs no shared memory. Not measured yet."""
    return CANDIDATES[0]


@triton.jit
def gated_delta_rule_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    y_ptr,
    slots_ptr,
    starts_ptr,
    positions_ptr,
    kept_ptr,
    num_heads,
    heads_of_key,
    query_scale,
    stride_qkv,
    stride_a,
    stride_b,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # Neighbouring programs take neighbouring columns.
    num_blocks: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks % num_heads
    pid_b = tl.program_id(0) // num_blocks // num_heads
    offs_k, offs_v = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = offs_k < KEY_DIM, offs_v < VALUE_DIM
    mask = mask_k[:, None] & mask_v[None, :]
    size = num_heads.to(tl.int64) * KEY_DIM * VALUE_DIM
    offs_state = (head * KEY_DIM + offs_k)[:, None] * VALUE_DIM + offs_v[None, :]
    start, end = tl.load(starts_ptr + pid_b), tl.load(starts_ptr + pid_b + 1)
    # What an earlier owner left is not read, for it may be no number.
    is_used = tl.load(positions_ptr + start) > 0
    own_ptr = state_ptr + tl.load(slots_ptr + pid_b) * size + offs_state
    state = tl.load(own_ptr, mask=mask & is_used, other=0.0)

    num_keys = num_heads // heads_of_key * KEY_DIM
    offs_query = head // heads_of_key * KEY_DIM + offs_k
    offs_value = 2 * num_keys + head * VALUE_DIM + offs_v
    rate = -tl.exp(tl.load(a_log_ptr + head))
    if BY_CHANNEL:
        bias = tl.load(dt_bias_ptr + head * KEY_DIM + offs_k, mask=mask_k, other=0.0)
    else:
        bias = tl.load(dt_bias_ptr + head)
    for number in range(start, end):
        token = tl.cast(number, tl.int64)
        row_ptr = qkv_ptr + token * stride_qkv
        query = tl.load(row_ptr + offs_query, mask=mask_k, other=0.0).to(tl.float32)
        key = tl.load(row_ptr + num_keys + offs_query, mask=mask_k, other=0.0).to(tl.float32)
        value = tl.load(row_ptr + offs_value, mask=mask_v, other=0.0).to(tl.float32)
        query = query * (query_scale / tl.sqrt(tl.sum(query * query, axis=0) + 1e-6))
        key = key / tl.sqrt(tl.sum(key * key, axis=0) + 1e-6)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + token * stride_b + head).to(tl.float32)))
        if BY_CHANNEL:
            a = tl.load(a_ptr + token * stride_a + head * KEY_DIM + offs_k, mask=mask_k, other=0.0)
            state *= tl.exp(rate * softplus(a.to(tl.float32) + bias))[:, None]
        else:
            state *= tl.exp(rate * softplus(tl.load(a_ptr + token * stride_a + head).to(tl.float32) + bias))
        delta = (value - tl.sum(state * key[:, None], axis=0)) * beta
        state += key[:, None] * delta[None, :]
        y = tl.sum(state * query[:, None], axis=0)
        y_row = y_ptr + (token * num_heads + head) * VALUE_DIM
        tl.store(y_row + offs_v, y.to(y_ptr.dtype.element_ty), mask=mask_v)
        if kept_ptr is not None:
            kept = tl.load(kept_ptr + token)
            if kept >= 0:
                tl.store(state_ptr + kept.to(tl.int64) * size + offs_state, state, mask=mask)
    # All threads have read what is written over now.
    tl.debug_barrier()
    tl.store(own_ptr, state, mask=mask)


def gated_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    sequences: StepSequences,
    key_dim: int,
    *,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch the rule over `qkv` (T, 2 * K * Dk + V * Dv); see `inflight_kernels.gated_delta_rule`."""
    check_float("qkv", qkv)
    if qkv.dim() != 2 or state.dim() != 4:
        raise ValueError(
            f"qkv must be (num_tokens, columns) and state (slots, heads, key_dim, value_dim), got {tuple(qkv.shape)} "
            f"and {tuple(state.shape)}"
        )
    num_tokens, num_heads, value_dim = qkv.shape[0], state.shape[1], state.shape[3]
    num_key_heads, rest = divmod(qkv.shape[1] - num_heads * value_dim, 2 * key_dim)
    if rest or num_key_heads < 1 or num_heads % num_key_heads:
        raise ValueError(
            f"qkv has {qkv.shape[1]} columns, which are not queries and keys of heads of {key_dim} and values of "
            f"{num_heads} heads of {value_dim}, a multiple of the former"
        )
    by_channel = a.dim() == 2 and a.shape[1] != num_heads
    num_decays = num_heads * key_dim if by_channel else num_heads
    check_shape("a", a, (num_tokens, num_decays))
    check_shape("b", b, (num_tokens, num_heads))
    for name, tensor in (("qkv", qkv), ("a", a), ("b", b)):
        check_dtype(name, tensor, qkv.dtype)
        check_unit_stride(name, tensor)
    check_vector("a_log", a_log, num_heads, torch.float32)
    check_vector("dt_bias", dt_bias, num_decays, torch.float32)
    check_state(state, (num_heads, key_dim, value_dim), torch.float32)
    num_sequences = check_sequences(sequences, num_tokens)
    y = torch.empty((num_tokens, num_heads * value_dim), dtype=qkv.dtype, device=qkv.device)
    if y.numel():
        if config is None:
            # The batch is left out, because the order of the sums must not depend on it.
            shape: dict[str, int | str] = {"key_dim": key_dim, "value_dim": value_dim, "dtype": str(qkv.dtype)}
            config = tuned("gated_delta_rule", shape, default_config(), qkv.device)
        block_v = min(config["BLOCK_V"], next_power_of_2(value_dim))
        gated_delta_rule_kernel[(num_sequences * num_heads * cdiv(value_dim, block_v),)](
            qkv,
            a,
            b,
            a_log,
            dt_bias,
            state,
            y,
            sequences.slots_B,
            sequences.starts,
            sequences.positions_T,
            sequences.kept_T,
            num_heads,
            num_heads // num_key_heads,
            key_dim**-0.5,
            qkv.stride(0),
            a.stride(0),
            b.stride(0),
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BY_CHANNEL=by_channel,
            BLOCK_K=next_power_of_2(key_dim),
            BLOCK_V=block_v,
            num_warps=config["num_warps"],
        )
    return y
