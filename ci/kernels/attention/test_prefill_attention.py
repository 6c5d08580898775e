"""Prefill attention: kernel and reference against the softmax written out, on ragged chunks over cached prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ci.kernels.kernel_cases import (
    ATTENTION_TOLERANCE,
    DTYPES,
    QUANTIZED_DTYPES,
    among_others,
    assert_near,
    capped_and_sinks,
    naive_attention,
    random_cache,
    sequence_of,
    stored_as,
    without_poison,
)
from inflight_kernels.attention import gpu, reference
from inflight_kernels.attention.gpu.prefill_attention import CANDIDATES, default_config
from inflight_kernels.common import checks

# (new tokens, all tokens): a first chunk, a later chunk, a decode row, nothing, a prompt within one tile, a long tail.
CHUNKS = [(70, 70), (9, 140), (1, 65), (0, 12), (2, 2), (66, 131)]


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
    **options: Any,
) -> Tensor:
    rows, begin = [], 0
    for row, (query_len, seq_len) in enumerate(chunks):
        k, v = (sequence_of(cache, table[row], seq_len) for cache in (k_cache, v_cache))
        rows.append(naive_attention(q[begin : begin + query_len], k, v, scale, window, **options))
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
    wide_table, table_rows = among_others(table)
    gpu.prefill_attention(
        padded.to(device),
        k_cache.to(device),
        v_cache.to(device),
        wide_table.to(device),
        starts.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        max(query_len for query_len, _ in CHUNKS),
        0.2,
        window,
        out,
        table_rows=table_rows.to(device),
    )
    expected = _expected(q, k_cache, v_cache, table, CHUNKS, 0.2, window)
    assert_near(out[:num_tokens], expected, ATTENTION_TOLERANCE[dtype])
    assert out[num_tokens:].isnan().all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_q_heads", "value_dim", "head_dim", "block_size", "kv_dtype"),
    [(5, 48, 64, 16, None), (66, 32, 40, 64, None), *((16, 64, 96, 8, kv_dtype) for kv_dtype in QUANTIZED_DTYPES)],
)
def test_values_may_be_the_first_elements_of_keys(
    num_q_heads: int,
    value_dim: int,
    head_dim: int,
    block_size: int,
    kv_dtype: torch.dtype | None,
    dtype: torch.dtype,
    deterministic: bool,
    device: torch.device,
) -> None:
    chunks = [(20, 20), (5, 40), (1, 35)]
    lengths = [seq_len for _, seq_len in chunks]
    wide, _, table = random_cache(lengths, block_size, 1, head_dim, torch.float32 if kv_dtype else dtype)
    rows, scale, read = stored_as(kv_dtype, wide, 0.5, dtype) if kv_dtype else (wide, 1.0, wide)
    starts = _starts(chunks)
    q = torch.randn(int(starts[-1]), num_q_heads, head_dim).to(dtype)
    cache, scale = rows.to(device), scale.to(device) if isinstance(scale, Tensor) else scale
    of_all = (starts, torch.tensor(lengths, dtype=torch.int32), 20, 0.2)
    actual = gpu.prefill_attention(
        q.to(device),
        cache,
        cache[..., :value_dim],
        table.to(device),
        *(x.to(device) if isinstance(x, Tensor) else x for x in of_all),
        k_scale=scale,
        v_scale=scale,
        deterministic=deterministic,
    )
    expected = _expected(q, read, read, table, chunks, 0.2, 0)[..., :value_dim]
    assert_near(actual, expected, ATTENTION_TOLERANCE[dtype])
    if kv_dtype is None:
        clean = without_poison(rows)
        found = reference.prefill_attention(q, clean, clean[..., :value_dim], table, *of_all)
        assert_near(found, expected, ATTENTION_TOLERANCE[dtype])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 33])
def test_kernel_caps_scores_and_has_sinks(
    window: int, dtype: torch.dtype, deterministic: bool, device: torch.device
) -> None:
    lengths = [seq_len for _, seq_len in CHUNKS]
    k_cache, v_cache, table = random_cache(lengths, 16, 2, 64, dtype)
    starts = _starts(CHUNKS)
    q = torch.randn(int(starts[-1]), 6, 64).to(dtype)
    for options in capped_and_sinks(6, device):
        actual = gpu.prefill_attention(
            *(x.to(device) for x in (q, k_cache, v_cache, table, starts)),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            70,
            0.2,
            window,
            deterministic=deterministic,
            **options,
        )
        assert_near(
            actual, _expected(q, k_cache, v_cache, table, CHUNKS, 0.2, window, **options), ATTENTION_TOLERANCE[dtype]
        )


def test_kernel_with_short_chunks_equals_softmax(device: torch.device) -> None:
    chunks = [(4, 90), (2, 2), (1, 40)]
    k_cache, v_cache, table = random_cache([90, 2, 40], 16, 2, 64, torch.float32)
    starts = _starts(chunks)
    q = torch.randn(int(starts[-1]), 6, 64)
    actual = gpu.prefill_attention(
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
    wide_table, table_rows = among_others(table)
    changes = ({}, *capped_and_sinks(9, torch.device("cpu")))
    for options, deterministic in itertools.product(changes, (False, True)):
        expected = _expected(q, k_cache, v_cache, table, CHUNKS, 0.25, window, **options) * 0.5
        actual = reference.prefill_attention(
            q,
            without_poison(k_cache),
            without_poison(v_cache),
            wide_table,
            starts,
            torch.tensor(lengths, dtype=torch.int32),
            70,
            0.125,
            window,
            table_rows=table_rows,
            k_scale=2.0,
            v_scale=0.5,
            deterministic=deterministic,
            **options,
        )
        assert_near(actual, expected, ATTENTION_TOLERANCE[dtype])


@pytest.mark.parametrize("kv_dtype", QUANTIZED_DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_reads_caches_of_8_bits(
    dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [seq_len for _, seq_len in CHUNKS]
    *wide, table = random_cache(lengths, block_size, 2, 64, torch.float32)
    (keys, k_scale, read_keys), (values, v_scale, read_values) = (
        stored_as(kv_dtype, cache, scale, dtype) for cache, scale in zip(wide, (0.5, 3.0), strict=True)
    )
    starts = _starts(CHUNKS)
    q = torch.randn(int(starts[-1]), 6, 64).to(dtype)
    for options in ({}, capped_and_sinks(6, device)[-1]):
        actual = gpu.prefill_attention(
            *(x.to(device) for x in (q, keys, values, table, starts)),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            70,
            0.2,
            k_scale=k_scale.to(device) if isinstance(k_scale, Tensor) else k_scale,
            v_scale=v_scale.to(device) if isinstance(v_scale, Tensor) else v_scale,
            **options,
        )
        expected = _expected(q, read_keys, read_values, table, CHUNKS, 0.2, 0, **options)
        # The values of fp8, and with them the error, are three times as large.
        assert_near(actual, expected, (1 if kv_dtype == torch.int8 else 3) * ATTENTION_TOLERANCE[dtype])


@pytest.mark.parametrize("config", CANDIDATES, ids=str)
def test_every_candidate_equals_softmax(config: dict[str, int], device: torch.device) -> None:
    chunks = [(40, 150), (3, 66)]
    k_cache, v_cache, table = random_cache([150, 66], 64, 1, 32, torch.float32)
    starts = _starts(chunks)
    q = torch.randn(int(starts[-1]), 5, 32)
    actual = gpu.prefill_attention(
        *(x.to(device) for x in (q, k_cache, v_cache, table, starts)),
        torch.tensor([150, 66], dtype=torch.int32, device=device),
        40,
        0.2,
        100,
        config=config,
    )
    assert_near(actual, _expected(q, k_cache, v_cache, table, chunks, 0.2, 100), ATTENTION_TOLERANCE[torch.float32])


Attention = Callable[..., Tensor]


@pytest.mark.parametrize("attend", [gpu.prefill_attention, reference.prefill_attention], ids=["kernel", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "is_changed"), [(0, False), (70, False), (70, True)])
def test_deterministic_rows_do_not_depend_on_batch_or_chunks(
    attend: Attention, dtype: torch.dtype, window: int, is_changed: bool, device: torch.device
) -> None:
    options = capped_and_sinks(4, device)[-1] if is_changed else {}
    *caches, table = random_cache([200, 90], 16, 1, 32, dtype)
    k_cache, v_cache = (without_poison(cache).to(device) for cache in caches)
    table = table.to(device)
    q = torch.randn(290, 4, 32).to(dtype).to(device)

    def rows(queries: Tensor, blocks: Tensor, chunks: list[tuple[int, int]]) -> Tensor:
        return attend(
            queries,
            k_cache,
            v_cache,
            blocks,
            _starts(chunks).to(device),
            torch.tensor([seq_len for _, seq_len in chunks], dtype=torch.int32, device=device),
            max(query_len for query_len, _ in chunks),
            0.125,
            window,
            deterministic=True,
            **options,
        )

    whole = rows(q, table, [(200, 200), (90, 90)])
    # Each prompt alone, in chunks that end within, at and after tiles of keys and of queries.
    for begin, length, row in ((0, 200, 0), (200, 90, 1)):
        for cuts in ([0, length], [0, 1, 33, 64, length], [0, 31, length - 1, length]):
            parts = [
                rows(q[begin + lo : begin + hi], table[row : row + 1], [(hi - lo, hi)]) for lo, hi in pairwise(cuts)
            ]
            assert torch.equal(torch.cat(parts), whole[begin : begin + length])
    # A chunk of one prompt beside a longer one of the other.
    mixed = rows(torch.cat([q[150:200], q[200:290]]), table, [(50, 200), (90, 90)])
    assert torch.equal(mixed, whole[150:])


def test_a_token_has_the_same_bits_in_a_prompt_and_in_a_decode_of_the_same_tiles(device: torch.device) -> None:
    *caches, table = random_cache([90], 64, 1, 32, torch.float16)
    k_cache, v_cache, table = (x.to(device) for x in (*map(without_poison, caches), table))
    q = torch.randn(40, 4, 32).half().to(device)
    lengths = torch.arange(51, 91, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 40], dtype=torch.int32, device=device)
    results: dict[int, Tensor] = {}
    for config in CANDIDATES:
        options: dict[str, Any] = {"deterministic": True, "config": config}
        prompt = gpu.prefill_attention(q, k_cache, v_cache, table, starts, lengths[-1:], 40, 0.125, 70, **options)
        decoded = gpu.decode_attention(q, k_cache, v_cache, table.expand(40, -1), lengths, 0.125, 70, **options)
        assert torch.equal(prompt, decoded), config
        results[config["BLOCK_N"]] = prompt
    # The comparison would see a difference: keys added up in other tiles give other bits.
    assert not torch.equal(results[32], results[64])


def test_last_token_of_a_prompt_equals_decode(device: torch.device) -> None:
    k_cache, v_cache, table = (x.to(device) for x in random_cache([77], 16, 2, 64, torch.float32))
    q = torch.randn(77, 4, 64, device=device)
    length = torch.tensor([77], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 77], dtype=torch.int32, device=device)
    prompt = gpu.prefill_attention(q, k_cache, v_cache, table, starts, length, 77, 0.125)
    last = gpu.decode_attention(q[76:], k_cache, v_cache, table, length, 0.125)
    assert_near(prompt[76:], last, ATTENTION_TOLERANCE[torch.float32])


def test_short_grids_take_shorter_tiles_unless_deterministic() -> None:
    cpu = torch.device("cpu")
    assert default_config(8192, 2048, 128, 2, cpu)["BLOCK_M"] == 128
    assert default_config(8192, 64, 128, 2, cpu)["BLOCK_M"] == 64
    assert default_config(32, 2048, 128, 2, cpu)["BLOCK_M"] == 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device's architecture is not a constant of ours")
def test_registers_are_limited_where_two_programs_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    limits = {}
    for capability in (80, 90, 100, 120):
        monkeypatch.setattr(checks, "DEFAULT_CAPABILITY", capability)
        limits[capability] = [default_config(rows, 2048, 128, 2, cpu)["maxnreg"] for rows in (8192, 32)]
    assert limits == {80: [0, 0], 90: [128, 0], 100: [0, 0], 120: [0, 0]}


def test_launcher_refuses_with_words() -> None:
    k_cache, v_cache, table = random_cache([5], 8, 1, 32, torch.float32)
    lengths = torch.tensor([5], dtype=torch.int32)
    q = torch.randn(5, 1, 32)
    with pytest.raises(ValueError, match="query_start_loc must have shape"):
        gpu.prefill_attention(q, k_cache, v_cache, table, lengths, lengths, 5, 1.0)
    with pytest.raises(ValueError, match="sliding_window must be 0"):
        gpu.prefill_attention(q, k_cache, v_cache, table, _starts([(5, 5)]), lengths, 5, 1.0, -1)
    with pytest.raises(ValueError, match=r"k_scale of a cache of torch\.int8 must be a tensor"):
        quantized = (k_cache.nan_to_num(0.0).char(), v_cache.nan_to_num(0.0).char())
        gpu.prefill_attention(q, *quantized, table, _starts([(5, 5)]), lengths, 5, 1.0)
