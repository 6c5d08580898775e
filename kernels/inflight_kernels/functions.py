"""The public functions: what each takes, gives and promises, whichever device runs it.

Legend: T tokens, B sequences, H hidden size, I intermediate size, Hq query heads, Hkv KV heads, D head_dim, V
vocabulary. A KV cache is (num_blocks, block_size, Hkv, D); slot = block_id * block_size + offset. "Float" is float32,
float16 or bfloat16. On a GPU no function here waits for the device, and the launchers raise ValueError for a shape,
dtype or stride that they cannot take.
"""

from __future__ import annotations

from torch import Tensor

from inflight_kernels import reference
from inflight_kernels.dispatch import implementation


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension of `x` (..., H), float, with `weight` (H,) of the same dtype.

    Without `residual` returns the normalised tensor. With it, s = x + residual rounded to the dtype is what gets
    normalised, and (norm(s), s) is returned. Hugging Face Llama's rounding: the normalised value is rounded before it
    is multiplied by the weight.
    """
    result: Tensor | tuple[Tensor, Tensor] = implementation(x).rms_norm(x, weight, eps, residual)
    return result


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `gate_up` (T, 2I), float, gate in the first half; returns (T, I)."""
    result: Tensor = implementation(gate_up).silu_and_mul(gate_up)
    return result


def rope_and_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Rotate `q` and `k`, write `k` and `v` into the cache, return the rotated q as a new contiguous (T, Hq, D).

    q (T, Hq, D), k and v (T, Hkv, D), float, may be views of one buffer. `cos_sin` (max_positions, 2R) float32 holds
    [cos | sin] of R = rotary_dim / 2 angles each; rotary_dim may be less than D, the rest of a head passes through.
    Rotation pairs element r with r + R (Llama, GPT-NeoX). `positions` and `slot_mapping` (T,) int64; a negative slot is
    not written. With both norm weights (D,), each head of q and k is RMS-normalised first (Qwen3).
    """
    result: Tensor = implementation(q).rope_and_kv_write(
        q, k, v, cos_sin, positions, k_cache, v_cache, slot_mapping, q_norm_weight, k_norm_weight, norm_eps
    )
    return result


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Attention of one token a sequence, at position seq_lens - 1, over that sequence's cached keys and values.

    q (B, Hq, D) float, caches of its dtype, `block_table` (B, max_blocks) int32, `seq_lens` (B,) int32 counting the new
    token; 0 marks a padded row, whose output is zeros. A `sliding_window` w > 0 leaves only the last w keys visible.
    Returns (B, Hq, D), into `out` if given. `scratch`, contiguous float32, holds partial results on a GPU
    (`ops.decode_attention.decode_scratch_elements` says how many); without it each call allocates.
    """
    result: Tensor = implementation(q).decode_attention(
        q, k_cache, v_cache, block_table, seq_lens, scale, sliding_window, out, scratch
    )
    return result


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged chunks of queries over the cache, which already holds their own keys and values.

    q (T, Hq, D) float: sequence b's rows are query_start_loc[b] to query_start_loc[b + 1] (int32, (B + 1,)), its last
    positions of seq_lens[b] (int32, (B,)) in all. `max_query_len` is at least the longest chunk. A `sliding_window`
    w > 0 makes key j visible to query i only where i - w < j <= i. Returns (T, Hq, D), into `out` if given; rows that
    belong to no sequence are left as they are.
    """
    result: Tensor = implementation(q).prefill_attention(
        q, k_cache, v_cache, block_table, query_start_loc, seq_lens, max_query_len, scale, sliding_window, out
    )
    return result


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    output_counts: Tensor | None = None,
    logit_bias: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    *,
    all_greedy: bool = False,
    any_top_k: bool = True,
    any_top_p: bool = True,
    any_min_p: bool = True,
    with_logprobs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Choose one token for each row of `logits` (B, V), float: (token ids int64, log-probabilities float32), both (B,).

    Per row: `temperature` (0 is greedy), `top_p` (1 is off), `min_p` (0 is off), penalties float32; `top_k` int32 (0 is
    off); `seeds` and `positions` int64. `prompt_mask` bool, `output_counts` int32, `logit_bias` float32 and
    `allowed_mask` bool are (B, V). In this order:

    1. add the bias; tokens that are not allowed become impossible;
    2. repetition penalty on tokens of prompt or output (positive logits are divided by it, others multiplied), then
       frequency_penalty * count and presence_penalty, over the output alone;
    3. greedy rows take the largest, the lowest index among equals;
    4. others divide by the temperature; top-k keeps all that tie with the k-th; top-p keeps the smallest set, in
       falling order, with mass of at least p of what top-k left (never none; among equals the lower index first); min-p
       keeps what is at least min_p times as probable as the most probable;
    5. one uniform number from (seed, position), see `philox_uniform`, picks from what is kept in vocabulary order.

    A row's token depends on nothing but that row. The log-probability is that of the token under the given logits,
    before any of these steps. The keywords are promises of what the host knows, and save work: `all_greedy` (every
    temperature is 0), `any_top_k`, `any_top_p`, `any_min_p` (False: no row uses it), `with_logprobs` (False: they may
    come as NaN). A row whose every token is impossible gives token 0.
    """
    result: tuple[Tensor, Tensor] = implementation(logits).sample(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        prompt_mask,
        output_counts,
        logit_bias,
        allowed_mask,
        all_greedy=all_greedy,
        any_top_k=any_top_k,
        any_top_p=any_top_p,
        any_min_p=any_min_p,
        with_logprobs=with_logprobs,
    )
    return result


def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """The float32 in [0, 1) that `sample` draws for each pair of int64 `seeds` and `positions`, on any device."""
    return reference.philox_uniform(seeds, positions)
