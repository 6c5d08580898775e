"""Decode attention: kernel and reference against the softmax written out, for every way the tiles are dealt out."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ci.kernels.interpreter import in_random_order
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
from inflight_kernels.attention.gpu.decode_attention import (
    CANDIDATES,
    decode_scratch_elements,
    default_config,
)
from inflight_kernels.common import checks
from inflight_kernels.common.last_program import counters

# The package has a function of the module's name.
launcher = sys.modules["inflight_kernels.attention.gpu.decode_attention"]
RAGGED = [1, 130, 64, 0, 65, 17]
SCHEDULES = {
    "split": {"persistent": 0, "programs_per_sm": 2, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 0},
    "persistent": {"persistent": 1, "programs_per_sm": 2, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 0},
    "persistent, small tiles": {
        "persistent": 1,
        "programs_per_sm": 2,
        "BLOCK_N": 16,
        "num_warps": 4,
        "num_stages": 3,
        "maxnreg": 0,
    },
}


def _int32(values: list[int], device: torch.device | None = None) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _expected(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lengths: list[int],
    scale: float,
    window: int,
    **options: Any,
) -> Tensor:
    rows = torch.zeros(q.shape)
    for row, length in enumerate(lengths):
        if length:
            k, v = (sequence_of(cache, table[row], length) for cache in (k_cache, v_cache))
            rows[row] = naive_attention(q[row : row + 1], k, v, scale, window, **options)[0]
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "block_size", "schedule", "programs", "window"),
    [
        (4, 4, 32, 8, "split", 24, 0),
        (9, 3, 64, 16, "split", 72, 0),
        (8, 2, 96, 16, "split", 36, 20),
        (3, 1, 64, 64, "split", 1, 70),
        (8, 1, 80, 64, "persistent", 5, 0),
        (8, 2, 128, 64, "persistent", 7, 0),
        (2, 2, 32, 128, "persistent", 9, 1),
        (9, 3, 64, 16, "persistent, small tiles", 11, 0),
        (3, 1, 64, 16, "persistent, small tiles", 40, 33),
        (4, 2, 32, 16, "persistent, small tiles", 1, 0),
    ],
)
def test_kernel_equals_softmax(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    schedule: str,
    programs: int,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    k_cache, v_cache, table = random_cache(RAGGED, block_size, num_kv_heads, head_dim, dtype)
    q = torch.randn(len(RAGGED), num_q_heads, head_dim).to(dtype)
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=device)
    elements = decode_scratch_elements(num_q_heads, num_kv_heads, head_dim, device)
    wide_table, table_rows = among_others(table)
    returned = gpu.decode_attention(
        q.to(device),
        k_cache.to(device),
        v_cache.to(device),
        wide_table.to(device),
        _int32(RAGGED, device),
        0.2,
        window,
        out,
        torch.full((elements,), float("nan"), device=device),
        table_rows=table_rows.to(device),
        config=SCHEDULES[schedule],
        num_programs=programs,
    )
    assert returned is out
    expected = _expected(q, k_cache, v_cache, table, RAGGED, 0.2, window)
    assert_near(out, expected, ATTENTION_TOLERANCE[dtype])
    assert not out[RAGGED.index(0)].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_q_heads", "value_dim", "head_dim", "block_size", "schedule", "kv_dtype"),
    [
        (5, 48, 64, 16, "split", None),
        # More than programs take at once, of either type.
        (66, 32, 40, 64, "persistent", None),
        (3, 64, 96, 16, "deterministic", None),
        *((6, 32, 48, 8, "persistent, small tiles", kv_dtype) for kv_dtype in QUANTIZED_DTYPES),
    ],
)
def test_values_may_be_the_first_elements_of_keys(
    num_q_heads: int,
    value_dim: int,
    head_dim: int,
    block_size: int,
    schedule: str,
    kv_dtype: torch.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    lengths = [1, 0, 70]
    wide, _, table = random_cache(lengths, block_size, 1, head_dim, torch.float32 if kv_dtype else dtype)
    rows, scale, read = stored_as(kv_dtype, wide, 0.5, dtype) if kv_dtype else (wide, 1.0, wide)
    q = torch.randn(len(lengths), num_q_heads, head_dim).to(dtype)
    cache, scale = rows.to(device), scale.to(device) if isinstance(scale, Tensor) else scale
    way: dict[str, Any] = {"config": SCHEDULES[schedule], "num_programs": 11} if schedule in SCHEDULES else {}
    actual = gpu.decode_attention(
        q.to(device),
        cache,
        cache[..., :value_dim],
        table.to(device),
        _int32(lengths, device),
        0.2,
        k_scale=scale,
        v_scale=scale,
        deterministic=not way,
        **way,
    )
    expected = _expected(q, read, read, table, lengths, 0.2, 0)[..., :value_dim]
    assert_near(actual, expected, ATTENTION_TOLERANCE[dtype])
    if kv_dtype is None:
        found = reference.decode_attention(
            q, without_poison(rows), without_poison(rows)[..., :value_dim], table, _int32(lengths), 0.2
        )
        assert_near(found, expected, ATTENTION_TOLERANCE[dtype])


@pytest.mark.parametrize("kv_dtype", QUANTIZED_DTYPES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_kernel_reads_caches_of_8_bits(
    block_size: int, dtype: torch.dtype, schedule: str, kv_dtype: torch.dtype, device: torch.device
) -> None:
    *wide, table = random_cache(RAGGED, block_size, 2, 64, torch.float32)
    (keys, k_scale, read_keys), (values, v_scale, read_values) = (
        stored_as(kv_dtype, cache, scale, dtype) for cache, scale in zip(wide, (0.5, 3.0), strict=True)
    )
    q = torch.randn(len(RAGGED), 6, 64).to(dtype)
    for options in ({}, capped_and_sinks(6, device)[-1]):
        actual = gpu.decode_attention(
            q.to(device),
            keys.to(device),
            values.to(device),
            table.to(device),
            _int32(RAGGED, device),
            0.2,
            k_scale=k_scale.to(device) if isinstance(k_scale, Tensor) else k_scale,
            v_scale=v_scale.to(device) if isinstance(v_scale, Tensor) else v_scale,
            config=SCHEDULES[schedule],
            num_programs=7,
            **options,
        )
        # The values of fp8, and with them the error, are three times as large.
        tolerance = (1 if kv_dtype == torch.int8 else 3) * ATTENTION_TOLERANCE[dtype]
        assert_near(actual, _expected(q, read_keys, read_values, table, RAGGED, 0.2, 0, **options), tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "deterministic"])
def test_kernel_caps_scores_and_has_sinks(schedule: str, window: int, dtype: torch.dtype, device: torch.device) -> None:
    """Whether one program has all of a pair's keys, or many have a part and one of them merges."""
    k_cache, v_cache, table = random_cache(RAGGED, 16, 2, 64, dtype)
    q = torch.randn(len(RAGGED), 6, 64).to(dtype)
    way: dict[str, Any] = {"config": SCHEDULES[schedule], "num_programs": 30} if schedule in SCHEDULES else {}
    for options in capped_and_sinks(6, device):
        actual = gpu.decode_attention(
            *(x.to(device) for x in (q, k_cache, v_cache, table)),
            _int32(RAGGED, device),
            0.2,
            window,
            deterministic=not way,
            **way,
            **options,
        )
        expected = _expected(q, k_cache, v_cache, table, RAGGED, 0.2, window, **options)
        assert_near(actual, expected, ATTENTION_TOLERANCE[dtype])
        assert not actual[RAGGED.index(0)].any()


@pytest.mark.parametrize("kv_dtype", QUANTIZED_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_nan_in_a_cache_of_8_bits_reaches_whoever_reads_it(
    kind: str, kv_dtype: torch.dtype, device: torch.device
) -> None:
    """Who then gets an error: it must not become a number."""
    lengths = [40, 20]
    *wide, table = random_cache(lengths, 16, 2, 32, torch.float32)
    place = (int(table[0, 1]), 3, 0)
    wide[kind == "values"][place] = torch.nan
    (keys, k_scale, _), (values, v_scale, _) = (stored_as(kv_dtype, cache, 1.0, torch.float32) for cache in wide)
    if kv_dtype == torch.float8_e4m3fn:  # of the other sign, too
        (values if kind == "values" else keys).view(torch.uint8)[place] = 0xFF
    q = torch.randn(2, 4, 32).to(device)
    found = gpu.decode_attention(
        q,
        keys.to(device),
        values.to(device),
        table.to(device),
        _int32(lengths, device),
        0.2,
        k_scale=k_scale.to(device) if isinstance(k_scale, Tensor) else k_scale,
        v_scale=v_scale.to(device) if isinstance(v_scale, Tensor) else v_scale,
    )
    assert found[0, :2].isnan().all() and found[0, 2:].isfinite().all() and found[1].isfinite().all()


def test_any_number_of_programs_shares_the_work(device: torch.device) -> None:
    lengths = [150, 0, 5, 48, 0, 17]
    k_cache, v_cache, table = random_cache(lengths, 16, 2, 32, torch.float32)
    q = torch.randn(len(lengths), 4, 32)
    expected = _expected(q, k_cache, v_cache, table, lengths, 0.2, 0)
    # 2 * (10 + 1 + 1 + 3 + 1 + 2) = 36 tiles: one program with all, unequal shares, one tile each, programs idle.
    for programs in (1, 2, 7, 13, 36, 45):
        actual = gpu.decode_attention(
            *(x.to(device) for x in (q, k_cache, v_cache, table)),
            _int32(lengths, device),
            0.2,
            config=SCHEDULES["persistent, small tiles"],
            num_programs=programs,
        )
        assert_near(actual, expected, ATTENTION_TOLERANCE[torch.float32])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whichever_program_comes_last_merges_the_same_bits(schedule: str, device: torch.device) -> None:
    k_cache, v_cache, table = (x.to(device) for x in random_cache(RAGGED, 16, 1, 32, torch.float32))
    q = torch.randn(len(RAGGED), 3, 32, device=device)

    def attend() -> Tensor:
        lengths, config = _int32(RAGGED, device), SCHEDULES[schedule]
        return gpu.decode_attention(q, k_cache, v_cache, table, lengths, 0.2, config=config, num_programs=12)

    expected = attend()
    with in_random_order():
        assert all(torch.equal(attend(), expected) for _ in range(3))
    assert not counters(1, device).any()


@pytest.mark.parametrize(("window", "is_changed"), [(0, False), (600, False), (600, True)])
def test_deterministic_rows_are_alike_alone_and_in_any_batch(
    window: int, is_changed: bool, device: torch.device
) -> None:
    lengths = [1300, 3, 0, 512, 513, 64]
    options = capped_and_sinks(4, device)[-1] if is_changed else {}
    k_cache, v_cache, table = (x.to(device) for x in random_cache(lengths, 64, 1, 32, torch.float32))
    q = torch.randn(len(lengths), 4, 32, device=device)

    def attend(rows: list[int], width: int) -> Tensor:
        return gpu.decode_attention(
            q[rows],
            k_cache,
            v_cache,
            table[rows, :width],
            _int32([lengths[row] for row in rows], device),
            0.2,
            window,
            deterministic=True,
            **options,
        )

    together = attend([0, 1, 2, 3, 4, 5], table.shape[1])
    for row, length in enumerate(lengths):
        assert torch.equal(attend([row], max(-(-length // 64), 1))[0], together[row])
    assert torch.equal(attend([4, 0, 4], table.shape[1]), together[[4, 0, 4]])
    expected = _expected(q.cpu(), k_cache.cpu(), v_cache.cpu(), table.cpu(), lengths, 0.2, window, **options)
    assert_near(together, expected, ATTENTION_TOLERANCE[torch.float32])
    # A prompt that ends with the same token, whole and in the last of its chunks.
    for queries in (32, 5):
        prompt = torch.cat([torch.randn(queries - 1, 4, 32, device=device), q[:1]])
        chunk = gpu.prefill_attention(
            prompt,
            k_cache,
            v_cache,
            table[:1],
            _int32([0, queries], device),
            _int32(lengths[:1], device),
            queries,
            0.2,
            window,
            deterministic=True,
            **options,
        )
        assert torch.equal(chunk[-1], together[0])


def test_kernel_reads_strided_queries_and_caches(device: torch.device) -> None:
    lengths = [33, 70]
    k_cache, v_cache, table = random_cache(lengths, 16, 2, 64, torch.float32)
    # One buffer (num_blocks, 2, block_size, heads, head_dim) as some engines keep it; q as a view of a qkv buffer.
    kv = torch.stack([k_cache, v_cache], dim=1).to(device)
    qkv = torch.randn(2, 10, 64)
    actual = gpu.decode_attention(
        qkv.to(device)[:, 2:6],
        kv[:, 0],
        kv[:, 1],
        table.to(device),
        _int32(lengths, device),
        0.125,
        num_programs=5,
    )
    expected = _expected(qkv[:, 2:6], k_cache, v_cache, table, lengths, 0.125, 0)
    assert_near(actual, expected, ATTENTION_TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [0, 1, 20, 500])
@pytest.mark.parametrize("lengths", [RAGGED, [50], [40, 40], [0, 0], [300, 290]])
def test_reference_equals_softmax(lengths: list[int], window: int, dtype: torch.dtype) -> None:
    k_cache, v_cache, table = random_cache(lengths, 16, 3, 64, dtype)
    q = torch.randn(len(lengths), 9, 64).to(dtype)
    wide_table, table_rows = among_others(table)
    for options in ({}, *capped_and_sinks(9, torch.device("cpu"))):
        actual = reference.decode_attention(
            q,
            without_poison(k_cache),
            without_poison(v_cache),
            wide_table,
            _int32(lengths),
            0.125,
            window,
            table_rows=table_rows,
            k_scale=2.0,
            v_scale=0.5,
            **options,
        )
        expected = _expected(q, k_cache, v_cache, table, lengths, 0.25, window, **options) * 0.5
        assert_near(actual, expected, ATTENTION_TOLERANCE[dtype])


def test_deterministic_reference_rows_are_alike_alone_and_in_any_batch() -> None:
    k_cache, v_cache, table = random_cache(RAGGED, 16, 3, 64, torch.float32)
    caches = (without_poison(k_cache), without_poison(v_cache))
    q, lengths = torch.randn(len(RAGGED), 9, 64), _int32(RAGGED)
    for changes in ({}, capped_and_sinks(9, torch.device("cpu"))[-1]):
        options = {"deterministic": True, **changes}
        together = reference.decode_attention(q, *caches, table, lengths, 0.125, **options)
        for row in range(len(RAGGED)):
            one = slice(row, row + 1)
            alone = reference.decode_attention(q[one], *caches, table[one], lengths[one], 0.125, **options)
            assert torch.equal(alone, together[one])


def test_scratch_covers_every_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEFAULT_MULTIPROCESSORS", 3)
    lengths = [5, 20]
    k_cache, v_cache, table = random_cache(lengths, 16, 1, 16, torch.float32)
    device = torch.device("cpu")
    scratch = torch.empty(decode_scratch_elements(2, 1, 16, device))
    if torch.cuda.is_available():
        pytest.skip("the device's multiprocessors are not a constant of ours")
    for config in CANDIDATES:
        gpu.decode_attention(
            torch.randn(2, 2, 16), k_cache, v_cache, table, _int32(lengths), 1.0, scratch=scratch, config=config
        )


def test_one_row_is_split_and_a_batch_is_dealt_out() -> None:
    cpu = torch.device("cpu")
    assert default_config(1, 4, 128, 64, 2, cpu)["persistent"] == 0
    assert default_config(2, 4, 128, 64, 2, cpu)["persistent"] == 1
    assert default_config(5000, 4, 128, 64, 2, cpu)["persistent"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device's architecture is not a constant of ours")
@pytest.mark.parametrize(("capability", "programs"), [(80, 2), (89, 1), (90, 3), (100, 3), (120, 1)])
def test_as_many_programs_are_launched_as_fit(capability: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEFAULT_CAPABILITY", capability)
    default = partial(default_config, head_dim=128, block_size=64, element_size=2, device=torch.device("cpu"))
    assert default(1, 4)["programs_per_sm"] == programs
    assert default(1, 64)["programs_per_sm"] == min(programs, 2)
    # The splits of one row are these programs, divided among its KV heads.
    grids: list[tuple[int, ...]] = []
    kernel = mock.MagicMock()
    kernel.__getitem__.side_effect = lambda grid: grids.append(grid) or mock.Mock()
    k_cache, v_cache, table = random_cache([64 * 200], 64, 2, 128, torch.float16)
    with mock.patch.object(launcher, "decode_split_kernel", kernel):
        gpu.decode_attention(torch.randn(1, 8, 128).half(), k_cache, v_cache, table, _int32([64 * 200]), 1.0)
    assert grids == [(2, programs * checks.DEFAULT_MULTIPROCESSORS // 2, 1)]


def test_launcher_refuses_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    k_cache, v_cache, table = random_cache([5], 8, 3, 32, torch.float32)
    lengths = _int32([5])
    q = torch.randn(1, 3, 32)
    with pytest.raises(ValueError, match="4 query heads cannot share 3 KV heads"):
        gpu.decode_attention(torch.randn(1, 4, 32), k_cache, v_cache, table, lengths, 1.0)
    with pytest.raises(ValueError, match=r"seq_lens must be torch\.int32"):
        gpu.decode_attention(q, k_cache, v_cache, table, lengths.long(), 1.0)
    with pytest.raises(ValueError, match="scratch must be contiguous float32 of at least"):
        config = SCHEDULES["persistent"]
        gpu.decode_attention(q, k_cache, v_cache, table, lengths, 1.0, scratch=torch.empty(1), config=config)
    with pytest.raises(ValueError, match=r"k_cache must be torch\.float32, got torch\.float16"):
        gpu.decode_attention(q, k_cache.half(), v_cache.half(), table, lengths, 1.0)
    with pytest.raises(ValueError, match="k_scale must be positive and finite, got 0"):
        gpu.decode_attention(q, k_cache, v_cache, table, lengths, 1.0, k_scale=0.0)
    with pytest.raises(ValueError, match="soft_cap must be 0"):
        gpu.decode_attention(q, k_cache, v_cache, table, lengths, 1.0, soft_cap=-1.0)
    one_head = k_cache[:, :, :1].contiguous()
    for keys, values in (
        (k_cache, k_cache[..., :16]),
        (one_head, one_head[..., 16:]),
        (one_head, one_head[..., :16].clone()),
    ):
        with pytest.raises(ValueError, match="must be the first elements of these, of one KV head"):
            gpu.decode_attention(q, keys, values, table, lengths, 1.0)
    with pytest.raises(ValueError, match="k_scale and v_scale of values that are part of the keys must be the same"):
        gpu.decode_attention(q, one_head, one_head[..., :16], table, lengths, 1.0, k_scale=2.0)
    with pytest.raises(ValueError, match=r"sinks must have shape \(3,\), got \(4,\)"):
        gpu.decode_attention(q, k_cache, v_cache, table, lengths, 1.0, sinks=torch.zeros(4))
    if not torch.cuda.is_available():
        monkeypatch.setattr(checks, "DEFAULT_CAPABILITY", 80)
        quantized = (k_cache.to(torch.float8_e4m3fn), v_cache.to(torch.float8_e4m3fn))
        with pytest.raises(ValueError, match="needs sm_89 or later, cpu is sm_80"):
            gpu.decode_attention(q, *quantized, table, lengths, 1.0)
