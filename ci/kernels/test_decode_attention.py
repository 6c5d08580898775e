"""Decode attention: kernel and reference against the softmax written out, for every way the KV length is split."""

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
from inflight_kernels.ops.decode_attention import decode_num_splits, decode_scratch_elements

RAGGED = [1, 130, 64, 0, 65, 17]


def _expected(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: list[int], scale: float, window: int
) -> Tensor:
    rows = torch.zeros(q.shape)
    for row, length in enumerate(lengths):
        if length:
            k, v = (sequence_of(cache, table[row], length) for cache in (k_cache, v_cache))
            rows[row] = naive_attention(q[row : row + 1], k, v, scale, window)[0]
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "block_size", "num_splits", "window"),
    [
        (4, 4, 32, 8, 1, 0),
        (9, 3, 64, 16, 4, 0),
        (8, 1, 80, 64, 2, 0),
        (8, 2, 96, 16, 3, 20),
        (8, 2, 128, 64, 8, 0),
        (3, 1, 64, 64, 1, 70),
        (2, 2, 32, 128, 4, 1),
    ],
)
def test_kernel_equals_softmax(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_splits: int,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    k_cache, v_cache, table = random_cache(RAGGED, block_size, num_kv_heads, head_dim, dtype)
    q = torch.randn(len(RAGGED), num_q_heads, head_dim).to(dtype)
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=device)
    scratch = torch.full(
        (decode_scratch_elements(len(RAGGED), num_q_heads, head_dim, num_splits),), float("nan"), device=device
    )
    returned = ops.decode_attention(
        q.to(device),
        k_cache.to(device),
        v_cache.to(device),
        table.to(device),
        torch.tensor(RAGGED, dtype=torch.int32, device=device),
        0.2,
        window,
        out,
        scratch,
        num_splits,
    )
    assert returned is out
    expected = _expected(q, k_cache, v_cache, table, RAGGED, 0.2, window)
    assert_near(out, expected, ATTENTION_TOLERANCE[dtype])
    assert not out[RAGGED.index(0)].any()


def test_kernel_reads_strided_queries_and_caches(device: torch.device) -> None:
    lengths = [33, 70]
    k_cache, v_cache, table = random_cache(lengths, 16, 2, 64, torch.float32)
    # One buffer (num_blocks, 2, block_size, heads, head_dim) as some engines keep it; q as a view of a qkv buffer.
    kv = torch.stack([k_cache, v_cache], dim=1).to(device)
    qkv = torch.randn(2, 10, 64)
    actual = ops.decode_attention(
        qkv.to(device)[:, 2:6],
        kv[:, 0],
        kv[:, 1],
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        0.125,
    )
    expected = _expected(qkv[:, 2:6], k_cache, v_cache, table, lengths, 0.125, 0)
    assert_near(actual, expected, ATTENTION_TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [0, 1, 20, 500])
@pytest.mark.parametrize("lengths", [RAGGED, [50], [40, 40], [0, 0], [300, 290]])
def test_reference_equals_softmax(lengths: list[int], window: int, dtype: torch.dtype) -> None:
    k_cache, v_cache, table = random_cache(lengths, 16, 3, 64, dtype)
    q = torch.randn(len(lengths), 9, 64).to(dtype)
    actual = reference.decode_attention(
        q,
        without_poison(k_cache),
        without_poison(v_cache),
        table,
        torch.tensor(lengths, dtype=torch.int32),
        0.125,
        window,
    )
    expected = _expected(q, k_cache, v_cache, table, lengths, 0.125, window)
    assert_near(actual, expected, ATTENTION_TOLERANCE[dtype])


def test_splits_follow_shapes_and_fill_the_device() -> None:
    cpu = torch.device("cpu")
    assert decode_num_splits(256, 8, 4096, cpu) == 1
    assert decode_num_splits(1, 8, 32768, cpu) == 32
    assert decode_num_splits(1, 8, 64, cpu) == 1
    assert all(
        bin(decode_num_splits(batch, heads, 8192, cpu)).count("1") == 1
        for batch in (1, 3, 17, 100)
        for heads in (1, 3, 8)
    )


def test_launcher_refuses_with_words() -> None:
    k_cache, v_cache, table = random_cache([5], 8, 3, 32, torch.float32)
    lengths = torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ValueError, match="4 query heads cannot share 3 KV heads"):
        ops.decode_attention(torch.randn(1, 4, 32), k_cache, v_cache, table, lengths, 1.0)
    with pytest.raises(ValueError, match=r"seq_lens must be torch\.int32"):
        ops.decode_attention(torch.randn(1, 3, 32), k_cache, v_cache, table, lengths.long(), 1.0)
    with pytest.raises(ValueError, match="scratch must be contiguous float32 of at least"):
        ops.decode_attention(
            torch.randn(1, 3, 32), k_cache, v_cache, table, lengths, 1.0, scratch=torch.empty(1), num_splits=2
        )
