"""The gated delta rule of linear attention, a chunk of C tokens at a time.

    S = exp(-exp(a_log) * softplus(a + dt_bias)) * S
    S = S + k (v - k S) * sigmoid(b)
    out = round(q S),   k = key / |key|,   q = query / |query| / sqrt(Dk)

Let D[i, j] be the product of the decays behind token j up to token i of a chunk, and D[i] that up to token i, S the
state before the chunk, and b[i] the gate. What token i adds is k[i] u[i], where (arXiv 2412.06464, section 3.3)

    (I + L) u = b (v - D k S),   L[i, j] = b[i] D[i, j] (k[i] k[j]) for j < i, else 0
    out[i] = D[i] q[i] S + sum over j <= i of D[i, j] (q[i] k[j]) u[j]
    S = D[C - 1] S + sum over j of D[C - 1, j] k[j] u[j]

With a decay of each row of S, k[i] k[j] and D[i, j] are of each row, and summed over them.

Bytes per sequence of V value heads: 4 V Dk Dv of state, as many where a chunk is completed, and per token in bf16
2 (2 K Dk + 2 V Dv) and 4 V; of the earlier tokens of an incomplete chunk, and for keeping new ones, 2 V (Dk + Dv)
each. Decodes are bound by memory bandwidth: 64 sequences of 32 heads of 128 x 128 have 134 MB of state, and with a
completed chunk in 16 and 7.5 tokens kept on average 152 MB, 35 us at 4.3 TB/s. Of operations a chunk has 6 V C Dk Dv in
products with the state, the last third of them where it is completed, and 4 V C C (Dk + Dv) among its tokens. A prompt
is bound by the latency of its chunks, one after the other: of a chunk, about ten products that need each other.

One program has one value head of one sequence and goes over its chunks; nobody else reads or writes what is kept of
it. It multiplies some rows of the state at a time, which are cached behind a prompt's first chunk: whole in registers,
a state of 128 x 128 spills, beside the operands of products. See `_chunks.py` for why no bit depends on a step's
borders.
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
from inflight_kernels.recurrent.gpu._delta_products import (
    decays_of_channels_to_end,
    inverse_of_unit,
    one_over_norm,
    products_by_channel,
)
from inflight_kernels.recurrent.gpu._sequences import check_chunk, check_sequences, check_state
from inflight_kernels.recurrent.step_sequences import StepSequences
from inflight_kernels.tuning import tuned

# Rows of a state that are multiplied at once; those of 128 columns are in 8 or 16 registers. More rows, or fewer
# threads, spill. Not measured yet.
CANDIDATES: list[dict[str, int]] = [{"BLOCK_K": 16, "num_warps": 8}]


def default_config() -> dict[str, int]:
    """Not measured yet."""
    return CANDIDATES[0]


@triton.jit
def log_decays_of(
    decay_ptr,
    stride,
    bias_ptr,
    kept_ptr,
    width,
    rate,
    first,
    start,
    end,
    offs_k,
    KEY_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """(C, rows), of the rows `offs_k` of a head's state; see `chunk_rows`. 0 for tokens from `end` on."""
    mask, columns = offs_k < KEY_DIM, offs_k[None, :]
    a = chunk_rows(decay_ptr + columns, stride, kept_ptr + columns, width, first, start, end, mask, CHUNK)
    bias = tl.load(bias_ptr + offs_k, mask=mask, other=0.0)
    is_known = (first + tl.arange(0, CHUNK) < end)[:, None]
    return tl.where(is_known, rate * softplus(a.to(tl.float32) + bias[None, :]), 0.0)


@triton.jit
def keep_inputs(
    key_ptr,
    value_ptr,
    stride_qkv,
    decay_ptr,
    stride_a,
    gate_ptr,
    stride_b,
    kept_ptr,
    to_ptr,
    first,
    start,
    end,
    is_kept,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    ALL_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write a head's inputs of the tokens that `is_kept` (C) names; see `keep_rows`."""
    keep_rows(key_ptr, stride_qkv, kept_ptr, to_ptr, WIDTH, first, start, end, is_kept, KEY_DIM, ALL_K, CHUNK)
    at: tl.constexpr = KEY_DIM
    keep_rows(
        value_ptr, stride_qkv, kept_ptr + at, to_ptr + at, WIDTH, first, start, end, is_kept, VALUE_DIM, BLOCK_V, CHUNK
    )
    at_decays: tl.constexpr = at + VALUE_DIM
    block: tl.constexpr = 1 if NUM_DECAYS == 1 else ALL_K
    keep_rows(
        decay_ptr, stride_a, kept_ptr + at_decays, to_ptr + at_decays, WIDTH,
        first, start, end, is_kept, NUM_DECAYS, block, CHUNK,
    )  # fmt: skip
    at_gate: tl.constexpr = at_decays + NUM_DECAYS
    keep_rows(gate_ptr, stride_b, kept_ptr + at_gate, to_ptr + at_gate, WIDTH, first, start, end, is_kept, 1, 1, CHUNK)


@triton.jit
def gated_delta_rule_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    chunk_ptr,
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
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    ALL_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # Neighbouring programs take neighbouring heads.
    head, pid_b = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads
    offs_t, offs_k, offs_v = tl.arange(0, CHUNK), tl.arange(0, ALL_K), tl.arange(0, BLOCK_V)
    mask_k, mask_v = offs_k < KEY_DIM, offs_v < VALUE_DIM
    start, end = tl.load(starts_ptr + pid_b), tl.load(starts_ptr + pid_b + 1)
    position, slot = tl.load(positions_ptr + start), tl.load(slots_ptr + pid_b)
    size = num_heads.to(tl.int64) * (KEY_DIM * VALUE_DIM)
    states_ptr = state_ptr + head * (KEY_DIM * VALUE_DIM)
    own_ptr = states_ptr + slot * size
    # Of a token: key, value, decays, gate.
    num_decays: tl.constexpr = KEY_DIM if BY_CHANNEL else 1
    at_decays: tl.constexpr = KEY_DIM + VALUE_DIM
    at_gate: tl.constexpr = at_decays + num_decays
    chunk_size = num_heads.to(tl.int64) * ((CHUNK - 1) * WIDTH)
    chunks_ptr = chunk_ptr + head * ((CHUNK - 1) * WIDTH)
    own_rows = chunks_ptr + slot * chunk_size

    num_keys = num_heads // heads_of_key * KEY_DIM
    query_ptr = qkv_ptr + head // heads_of_key * KEY_DIM
    key_ptr = query_ptr + num_keys
    value_ptr = qkv_ptr + 2 * num_keys + head * VALUE_DIM
    decay_ptr, gate_ptr = a_ptr + head * num_decays, b_ptr + head
    rate = -tl.exp(tl.load(a_log_ptr + head))
    is_before, is_not_behind = offs_t[:, None] > offs_t[None, :], offs_t[:, None] >= offs_t[None, :]
    for first in range(start - (position % CHUNK).to(tl.int32), end, CHUNK):
        token = first + offs_t
        # The state before the first chunk of a sequence is not read: what an earlier owner left may be no number.
        is_used, is_new = position + (first - start) > 0, (token >= start) & (token < end)
        keys = chunk_rows(
            key_ptr + offs_k[None, :], stride_qkv, own_rows + offs_k[None, :], WIDTH, first, start, end, mask_k, CHUNK
        )
        query_rows = query_ptr + token.to(tl.int64)[:, None] * stride_qkv
        queries = tl.load(query_rows + offs_k[None, :], mask=is_new[:, None] & mask_k[None, :], other=0.0)
        query_share, key_share = query_scale * one_over_norm(queries), one_over_norm(keys)
        if not BY_CHANNEL:
            decay = chunk_numbers(decay_ptr, stride_a, own_rows + at_decays, WIDTH, first, start, end, CHUNK)
            growth = softplus(decay.to(tl.float32) + tl.load(dt_bias_ptr + head))
            log_decay = tl.where(token < end, rate * growth, 0.0)

        among_keys = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        among_queries = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        remembered = tl.zeros((CHUNK, BLOCK_V), dtype=tl.float32)
        y = tl.zeros((CHUNK, BLOCK_V), dtype=tl.float32)
        for part in range(0, KEY_DIM, BLOCK_K):
            offs = part + tl.arange(0, BLOCK_K)
            mask = offs < KEY_DIM
            state = tl.load(
                own_ptr + offs[:, None] * VALUE_DIM + offs_v[None, :],
                mask=mask[:, None] & mask_v[None, :] & is_used,
                other=0.0,
            )
            some_queries = tl.load(query_rows + offs[None, :], mask=is_new[:, None] & mask[None, :], other=0.0)
            some_keys = chunk_rows(
                key_ptr + offs[None, :], stride_qkv, own_rows + offs[None, :], WIDTH, first, start, end, mask, CHUNK
            )
            query = some_queries.to(tl.float32) * query_share[:, None]
            key = some_keys.to(tl.float32) * key_share[:, None]
            if BY_CHANNEL:
                log_decays = log_decays_of(
                    decay_ptr, stride_a, dt_bias_ptr + head * KEY_DIM, own_rows + at_decays, WIDTH, rate,
                    first, start, end, offs, KEY_DIM, CHUNK,
                )  # fmt: skip
                of_keys, of_queries = products_by_channel(query, key, log_decays)
                to_row = tl.exp(tl.cumsum(log_decays, axis=0))
            else:
                of_keys, of_queries = product(key, key.T), product(query, key.T)
                to_row = tl.exp(tl.cumsum(log_decay, axis=0))[:, None]
            among_keys += of_keys
            among_queries += of_queries
            remembered += product(key * to_row, state)
            y += product(query * to_row, state)
        if not BY_CHANNEL:
            between = decays_between(log_decay)
            among_keys *= between
            among_queries *= between
        gate = chunk_numbers(gate_ptr, stride_b, own_rows + at_gate, WIDTH, first, start, end, CHUNK)
        gate = 1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))
        value = chunk_rows(
            value_ptr + offs_v[None, :], stride_qkv, own_rows + (KEY_DIM + offs_v)[None, :], WIDTH,
            first, start, end, mask_v, CHUNK,
        )  # fmt: skip
        inverse = inverse_of_unit(tl.where(is_before, among_keys * gate[:, None], 0.0), CHUNK)
        added = product(inverse, (value.to(tl.float32) - remembered) * gate[:, None])
        y += product(tl.where(is_not_behind, among_queries, 0.0), added)
        y_rows = y_ptr + (token.to(tl.int64) * num_heads + head)[:, None] * VALUE_DIM
        tl.store(y_rows + offs_v[None, :], y.to(y_ptr.dtype.element_ty), mask=is_new[:, None] & mask_v[None, :])

        if kept_ptr is not None:
            for place in range(tl.maximum(start - first, 0), tl.minimum(end - first, CHUNK - 1)):
                kept = tl.load(kept_ptr + first + place).to(tl.int64)
                if kept >= 0:
                    copy_state(own_ptr, states_ptr + kept * size, is_used, KEY_DIM * VALUE_DIM)
                    keep_inputs(
                        key_ptr, value_ptr, stride_qkv, decay_ptr, stride_a, gate_ptr, stride_b, own_rows,
                        chunks_ptr + kept * chunk_size, first, start, end, offs_t <= place,
                        KEY_DIM, VALUE_DIM, num_decays, CHUNK, WIDTH, ALL_K, BLOCK_V,
                    )  # fmt: skip
        # All threads have read what is written over now.
        tl.debug_barrier()
        if first + CHUNK <= end:
            for part in tl.range(0, KEY_DIM, BLOCK_K, num_stages=1):
                offs = part + tl.arange(0, BLOCK_K)
                mask = offs < KEY_DIM
                some_keys = chunk_rows(
                    key_ptr + offs[None, :], stride_qkv, own_rows + offs[None, :], WIDTH, first, start, end, mask, CHUNK
                )
                key = some_keys.to(tl.float32) * key_share[:, None]
                if BY_CHANNEL:
                    log_decays = log_decays_of(
                        decay_ptr, stride_a, dt_bias_ptr + head * KEY_DIM, own_rows + at_decays, WIDTH, rate,
                        first, start, end, offs, KEY_DIM, CHUNK,
                    )  # fmt: skip
                    to_end, of_chunk = (
                        decays_of_channels_to_end(log_decays),
                        tl.exp(tl.sum(log_decays, axis=0))[:, None],
                    )
                else:
                    to_end, of_chunk = decays_to_end(log_decay)[:, None], tl.exp(tl.sum(log_decay, axis=0))
                part_ptr = own_ptr + offs[:, None] * VALUE_DIM + offs_v[None, :]
                mask = mask[:, None] & mask_v[None, :]
                state = of_chunk * tl.load(part_ptr, mask=mask & is_used, other=0.0)
                tl.store(part_ptr, state + product((key * to_end).T, added), mask=mask)
            # All threads see the whole state now.
            tl.debug_barrier()
            if kept_ptr is not None:
                kept = tl.load(kept_ptr + first + CHUNK - 1).to(tl.int64)
                if kept >= 0:
                    copy_state(own_ptr, states_ptr + kept * size, True, KEY_DIM * VALUE_DIM)
        else:
            keep_inputs(
                key_ptr, value_ptr, stride_qkv, decay_ptr, stride_a, gate_ptr, stride_b, own_rows,
                own_rows, first, start, end, is_new,
                KEY_DIM, VALUE_DIM, num_decays, CHUNK, WIDTH, ALL_K, BLOCK_V,
            )  # fmt: skip


def gated_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    sequences: StepSequences,
    key_dim: int,
    chunk: Tensor | None = None,
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
    num_decays = key_dim if by_channel else 1
    check_shape("a", a, (num_tokens, num_heads * num_decays))
    check_shape("b", b, (num_tokens, num_heads))
    for name, tensor in (("qkv", qkv), ("a", a), ("b", b)):
        check_dtype(name, tensor, qkv.dtype)
        check_unit_stride(name, tensor)
    check_vector("a_log", a_log, num_heads, torch.float32)
    check_vector("dt_bias", dt_bias, num_heads * num_decays, torch.float32)
    check_state("state", state, (num_heads, key_dim, value_dim), torch.float32)
    chunk_of_slot = chunk_shape(qkv, num_heads, key_dim + value_dim + num_decays + 1)
    chunk = check_chunk(chunk, state, chunk_of_slot, qkv.dtype)
    num_sequences = check_sequences(sequences, num_tokens)
    y = torch.empty((num_tokens, num_heads * value_dim), dtype=qkv.dtype, device=qkv.device)
    if y.numel():
        if config is None:
            # The batch is left out, because the order of the sums must not depend on it.
            shape: dict[str, int | str] = {"key_dim": key_dim, "value_dim": value_dim, "dtype": str(qkv.dtype)}
            config = tuned("gated_delta_rule", shape, default_config(), qkv.device)
        gated_delta_rule_kernel[(num_sequences * num_heads,)](
            qkv,
            a,
            b,
            a_log,
            dt_bias,
            state,
            chunk,
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
            CHUNK=CHUNK,
            WIDTH=chunk_of_slot[2],
            ALL_K=max(next_power_of_2(key_dim), MIN_BLOCK),
            BLOCK_K=config["BLOCK_K"],
            BLOCK_V=max(next_power_of_2(value_dim), MIN_BLOCK),
            num_warps=config["num_warps"],
        )
    return y
