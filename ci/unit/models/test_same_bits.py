"""A token has the same bits however it comes to be computed: in a decode, in a chunk with any borders, beside any
others, by any number of threads, on one rank or on two; so a sequence that is computed again goes on with the same
tokens. Another number of ranks may give other bits. Of compiled networks, and of torch's with the key `deterministic`;
the cache of both may be fp8 or int8. ci/kernels has the same test of the kernels.

Run: pytest ci/unit/models/test_same_bits.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from compiled_network import HAS_AMX, IN_ORDER_OF_FMA, force, needs_compiler
from random_decoders import CAPPED, HEADS, WITH_SINKS, DecoderOnRanks, RandomHeads
from thread_ranks import ThreadRanks
from token_steps import assert_same, at_once, attend_to_exact_keys, compute, in_random_steps, one_by_one

from inflight_kernels.cpu import Instruction, Variant
from inflight_kernels.cpu.variants import AMX

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_threads")]

HEADS_FOR_RANKS = [*HEADS[2:4], WITH_SINKS]
"""Heads that two ranks can share; both hold a copy of the first layer's only key head."""
LENGTHS = (560, 140, 41, 7)
"""Tokens of each sequence: parts and steps of attention end inside the first ones."""
LENGTHS_ON_RANKS = (140, 41, 7)
OF_8_BITS = [torch.float8_e4m3fn, torch.int8]


@pytest.fixture
def two_ranks() -> Iterator[ThreadRanks]:
    ranks = ThreadRanks(2)
    yield ranks
    ranks.close()


def assert_same_however_computed(
    decoder: DecoderOnRanks, lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [compute(decoder, lengths, one_by_one(lengths, sequence)) for sequence in range(len(lengths))]
    for num_threads, steps in (
        (2, at_once(lengths)),
        (1, in_random_steps(lengths, 1)),
        (2, in_random_steps(lengths, 2)),
        (2, in_random_steps(lengths, 3)),
    ):
        monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
        together = compute(decoder, lengths, steps)
        for sequence, expected in enumerate(alone):
            assert_same(together, expected, sequence)
    last = torch.stack([expected.hidden[sequence][-1] for sequence, expected in enumerate(alone)])
    for row, logits in enumerate(decoder.logits(last)):
        assert torch.equal(decoder.logits(last[row : row + 1])[0], logits)


@needs_compiler
@pytest.mark.parametrize("heads", [*HEADS, CAPPED, WITH_SINKS], ids=str)
def test_tokens_have_the_same_bits_however_they_are_computed(
    heads: RandomHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_however_computed(DecoderOnRanks(heads), LENGTHS, monkeypatch)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "variant", "instruction"), IN_ORDER_OF_FMA + [(torch.bfloat16, None, Instruction.FMA_AS_AMX)], ids=str
)
def test_so_they_have_in_every_type_by_every_variant(
    dtype: torch.dtype, variant: Variant | None, instruction: Instruction, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, instruction, variant)
    assert_same_however_computed(DecoderOnRanks(HEADS[2], dtype=dtype), LENGTHS, monkeypatch)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, None),
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.int8),
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", HEADS_FOR_RANKS, ids=str)
def test_so_they_have_on_two_ranks(
    heads: RandomHeads,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    two_ranks: ThreadRanks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = DecoderOnRanks(heads, two_ranks, dtype, kv_dtype=kv_dtype)
    assert_same_however_computed(decoder, LENGTHS_ON_RANKS, monkeypatch)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        *((HEADS[4], dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *((heads, torch.float32) for heads in (CAPPED, WITH_SINKS)),
    ],
    ids=str,
)
def test_so_they_have_in_torch_if_it_is_deterministic(
    heads: RandomHeads, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_however_computed(DecoderOnRanks(heads, None, dtype, deterministic=True), (150, 41, 7), monkeypatch)


@pytest.mark.parametrize("kv_dtype", OF_8_BITS, ids=str)
def test_so_they_have_with_a_cache_of_8_bits(kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = DecoderOnRanks(HEADS[0], None, torch.float32, deterministic=True, kv_dtype=kv_dtype)
    assert_same_however_computed(decoder, (41, 20, 7), monkeypatch)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_dtype"), [*((HEADS[2], dtype) for dtype in OF_8_BITS), (CAPPED, None), (WITH_SINKS, None)], ids=str
)
def test_so_they_have_in_cpp_and_the_same_ones_by_all_variants(
    heads: RandomHeads, kv_dtype: torch.dtype | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, expected = LENGTHS_ON_RANKS, {}
    as_amx = [(torch.bfloat16, None, Instruction.FMA_AS_AMX), *([(torch.bfloat16, AMX, None)] if HAS_AMX else [])]
    for order, all_of_order in (("fma", IN_ORDER_OF_FMA), ("amx", as_amx)):
        for of_dtype, variant, instruction in all_of_order:
            if of_dtype != dtype:
                continue
            force(monkeypatch, instruction, variant)
            decoder = DecoderOnRanks(heads, dtype=dtype, kv_dtype=kv_dtype)
            assert_same_however_computed(decoder, lengths, monkeypatch)
            found = compute(decoder, lengths, at_once(lengths))
            for sequence in range(len(lengths)):
                assert_same(found, expected.setdefault(order, found), sequence)


@pytest.mark.parametrize("kv_dtype", OF_8_BITS, ids=str)
def test_they_would_not_if_a_prompt_attended_to_its_own_keys_before_they_are_rounded(
    kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend_to_exact_keys(monkeypatch)
    decoder = DecoderOnRanks(HEADS[0], None, torch.float32, deterministic=True, kv_dtype=kv_dtype)
    with pytest.raises(AssertionError):
        assert_same_however_computed(decoder, (7,), monkeypatch)
