"""A token has the same bits however it comes to be computed: in a decode, in a chunk with any borders, beside any
others, by any number of threads; so a sequence that is computed again goes on with the same tokens. Of compiled
networks, and of torch's with the key `deterministic`; ci/kernels has the same test of the kernels.

Run: pytest ci/unit/models/test_same_bits.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compiled_network import needs_compiler
from random_decoders import HEADS, RandomHeads, compile_alone, random_decoder
from token_steps import assert_same, at_once, compute, in_random_steps, one_by_one

from inflight_kernels.cpu import Instruction
from inflight_kernels.cpu.instructions import VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_threads")]

VECTORS = (Instruction.VDPBF16PS, Instruction.FMA, Instruction.FMA_AS_AMX)
"""To be forced, besides what is chosen here."""
LENGTHS = (560, 140, 41, 7)
"""Tokens of each sequence: parts and steps of attention end inside the first ones."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("libraries")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFLIGHT_CACHE_DIR", str(folder))
        yield folder


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "instruction"),
    [*((heads, None) for heads in HEADS), *zip(HEADS, VECTORS, strict=False)],
    ids=str,
)
def test_tokens_have_the_same_bits_however_they_are_computed(
    heads: RandomHeads, instruction: Instruction | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if instruction is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, instruction.value)
    decoder, cache = random_decoder(heads, torch.bfloat16)
    network = compile_alone(decoder, cache)
    alone = [compute(network, cache, LENGTHS, one_by_one(sequence, LENGTHS)) for sequence in range(len(LENGTHS))]
    for num_threads, steps in (
        (2, at_once(LENGTHS)),
        (1, in_random_steps(1, LENGTHS)),
        (2, in_random_steps(2, LENGTHS)),
        (2, in_random_steps(3, LENGTHS)),
    ):
        monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
        together = compute(network, cache, LENGTHS, steps)
        for sequence, expected in enumerate(alone):
            assert_same(together, expected, sequence)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_deterministic_torch_layers_compute_the_same_bits(dtype: torch.dtype) -> None:
    lengths = (150, 41, 7)
    decoder, cache = random_decoder(HEADS[4], dtype, deterministic=True)
    alone = [compute(decoder, cache, lengths, one_by_one(sequence, lengths)) for sequence in range(len(lengths))]
    for steps in (at_once(lengths), in_random_steps(1, lengths), in_random_steps(2, lengths)):
        together = compute(decoder, cache, lengths, steps)
        for sequence, expected in enumerate(alone):
            assert_same(together, expected, sequence)
