"""Attention over a paged KV cache, of one new token per sequence or of chunks of prompts; and of whole sequences to
themselves, which needs no cache."""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.dispatch import implementation


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
    *,
    table_rows: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    deterministic: bool = False,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one token a sequence, at position seq_lens - 1, over that sequence's cached keys and values.

    q (B, Hq, D) float, caches of its dtype, float8_e4m3fn (on a GPU from sm_89) or int8, `block_table` (rows,
    max_blocks) int32, of which sequence b has row table_rows[b] (int64, (B,); None = row b). `seq_lens` (B,) int32
    including the new token; 0 marks a padded row, whose output is zeros. With a `sliding_window` w > 0 only the last w
    keys are visible. The caches hold keys / k_scale and values / v_scale; of int8 each slot and head has a scale of its
    own, float32 (num_blocks, block_size, Hkv), and what is read is rounded to q's dtype. With a `soft_cap` c > 0 each
    score s becomes c tanh(s / c) before the softmax (Gemma 2). `sinks`, contiguous float32 (Hq,): each query head has
    one more logit in its softmax, of a key that has no value (gpt-oss). `v_cache` may be a view of the first Dv < D
    elements of every key in `k_cache`: the latents of DeepSeek, whose scales are then the same. Returns (B, Hq, Dv), Dv
    being D otherwise, written to `out` if given.
    `scratch`, contiguous float32, holds partial results on a GPU (its size is `decode_scratch_elements`, beside the
    launcher); without it each call allocates. `deterministic`: a row's bits do not depend on the other rows of the
    batch, and are those of the deterministic `prefill_attention`.
    """
    result: Tensor = implementation(q, __name__).decode_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        scale,
        sliding_window,
        out,
        scratch,
        table_rows=table_rows,
        k_scale=k_scale,
        v_scale=v_scale,
        deterministic=deterministic,
        soft_cap=soft_cap,
        sinks=sinks,
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
    *,
    table_rows: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    deterministic: bool = False,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged chunks of queries over the cache, which already holds their own keys and values.

    q (T, Hq, D) float, caches, their scales, `block_table`, `table_rows`, `soft_cap` and `sinks` as in
    `decode_attention`: sequence b's queries are query_start_loc[b] to query_start_loc[b + 1] (int32, (B + 1,)), its
    last positions of seq_lens[b] (int32, (B,)) in all. `max_query_len` is at least the length of the longest chunk.
    With a `sliding_window` w > 0 key j is visible to query i only if i - w < j <= i. Returns (T, Hq, Dv), written
    to `out` if given; rows that belong to no sequence are not written.
    `deterministic`: a row's bits depend neither on the rest of the batch nor on how the prompt is divided into chunks,
    be it into single tokens.
    """
    result: Tensor = implementation(q, __name__).prefill_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        scale,
        sliding_window,
        out,
        table_rows=table_rows,
        k_scale=k_scale,
        v_scale=v_scale,
        deterministic=deterministic,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    return result


def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    max_len: int,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of the tokens of whole sequences, packed one behind the other, each to all tokens of its sequence.

    q (T, Hq, D) float, k and v (T, Hkv, D) of its dtype; sequence b's tokens are starts[b] to starts[b + 1] (int32,
    (B + 1,)), at least one. `max_len` is at least the length of the longest. With a `window` w > 0 token i sees token j
    only if |i - j| <= w. `bias`, contiguous float32 (Hq, 2 P - 1), is added to scores: bias[h, P - 1 + j - i] of query
    i and key j of head h, of sequences of at most P tokens. Returns (T, Hq, D). A sequence's bits do not depend
    on the others.
    """
    result: Tensor = implementation(q, __name__).bidirectional_attention(q, k, v, starts, max_len, scale, window, bias)
    return result
