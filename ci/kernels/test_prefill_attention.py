"""Prefill attention: kernel and reference against the softmax written out, on ragged chunks over cached prefixes."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    ATTENTION_TOLERANCE,
    DTYPES,
    assert_near,
    naive_attention,
    random_cache,
    sequence_of,
    without_poison,
)
from torch import Tensor

from inflight_kernels import ops, reference

# (new tokens, all tokens): a first chunk, a later chunk, a decode row, nothing, a prompt within one tile, a long tail.
CHUNKS = [(70, 70), (9, 140), (1, 65), (0, 12), (3, 3), (66, 131)]


def _starts(chunks: list[tuple[int, int]]) -> Tensor:
    counts = torch.tensor([0] + [query_len for query_len, _ in chunks])
    return counts.cumsum(0).int()


def _expected(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    chunks: list[tuple[int, int]],
    scale: float,
    window: int,
) -> Tensor:
    rows, begin = [], 0
    for row, (query_len, seq_len) in enumerate(chunks):
        k, v = (sequence_of(cache, table[row], seq_len) for cache in (k_cache, v_cache))
        rows.append(naive_attention(q[begin : begin + query_len], k, v, scale, window))
        begin += query_len
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "block_size", "window"),
    [
        (2, 2, 32, 8, 0),
        (3, 1, 64, 16, 0),
        (4, 1, 128, 64, 0),
        (8, 1, 80, 64, 0),
        (4, 4, 96, 16, 33),
        (3, 1, 64, 64, 1),
        (2, 1, 32, 128, 100),
    ],
)
def test_kernel_equals_softmax(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    lengths = [seq_len for _, seq_len in CHUNKS]
    k_cache, v_cache, table = random_cache(lengths, block_size, num_kv_heads, head_dim, dtype)
    starts = _starts(CHUNKS)
    num_tokens = int(starts[-1])
    q = torch.randn(num_tokens, num_q_heads, head_dim).to(dtype)
    # Two rows more than tokens: padding, which must stay as it is.
    out = torch.full((num_tokens + 2, num_q_heads, head_dim), float("nan"), dtype=dtype, device=device)
    padded = torch.cat([q, torch.zeros(2, num_q_heads, head_dim, dtype=dtype)])
    ops.prefill_attention(
        padded.to(device),
        k_cache.to(device),
        v_cache.to(device),
        table.to(device),
        starts.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        max(query_len for query_len, _ in CHUNKS),
        0.2,
        window,
        out,
    )
    expected = _expected(q, k_cache, v_cache, table, CHUNKS, 0.2, window)
    assert_near(out[:num_tokens], expected, ATTENTION_TOLERANCE[dtype])
    assert out[num_tokens:].isnan().all()


def test_kernel_with_short_chunks_equals_softmax(device: torch.device) -> None:
    chunks = [(4, 90), (2, 2), (1, 40)]
    k_cache, v_cache, table = random_cache([90, 2, 40], 16, 2, 64, torch.float32)
    starts = _starts(chunks)
    q = torch.randn(int(starts[-1]), 6, 64)
    actual = ops.prefill_attention(
        q.to(device),
        k_cache.to(device),
        v_cache.to(device),
        table.to(device),
        starts.to(device),
        torch.tensor([90, 2, 40], dtype=torch.int32, device=device),
        4,
        0.125,
    )
    assert_near(actual, _expected(q, k_cache, v_cache, table, chunks, 0.125, 0), ATTENTION_TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [0, 1, 33, 100])
def test_reference_equals_softmax(window: int, dtype: torch.dtype) -> None:
    lengths = [seq_len for _, seq_len in CHUNKS]
    k_cache, v_cache, table = random_cache(lengths, 16, 3, 64, dtype)
    starts = _starts(CHUNKS)
    q = torch.randn(int(starts[-1]), 9, 64).to(dtype)
    actual = reference.prefill_attention(
        q,
        without_poison(k_cache),
        without_poison(v_cache),
        table,
        starts,
        torch.tensor(lengths, dtype=torch.int32),
        70,
        0.125,
        window,
    )
    assert_near(actual, _expected(q, k_cache, v_cache, table, CHUNKS, 0.125, window), ATTENTION_TOLERANCE[dtype])


def test_last_token_of_a_prompt_equals_decode(device: torch.device) -> None:
    k_cache, v_cache, table = (x.to(device) for x in random_cache([77], 16, 2, 64, torch.float32))
    q = torch.randn(77, 4, 64, device=device)
    length = torch.tensor([77], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 77], dtype=torch.int32, device=device)
    prompt = ops.prefill_attention(q, k_cache, v_cache, table, starts, length, 77, 0.125)
    last = ops.decode_attention(q[76:], k_cache, v_cache, table, length, 0.125)
    assert_near(prompt[76:], last, ATTENTION_TOLERANCE[torch.float32])


def test_launcher_refuses_with_words() -> None:
    k_cache, v_cache, table = random_cache([5], 8, 1, 32, torch.float32)
    lengths = torch.tensor([5], dtype=torch.int32)
    q = torch.randn(5, 1, 32)
    with pytest.raises(ValueError, match="query_start_loc must have shape"):
        ops.prefill_attention(q, k_cache, v_cache, table, lengths, lengths, 5, 1.0)
    with pytest.raises(ValueError, match="sliding_window must be 0"):
        ops.prefill_attention(q, k_cache, v_cache, table, _starts([(5, 5)]), lengths, 5, 1.0, -1)
