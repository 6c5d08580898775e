"""A token of a compiled network has the same bits however it comes to be computed: in a decode, in a chunk with any
borders, beside any others, by any number of threads, on one rank or on two; so a sequence that is computed again goes
on with the same tokens. Another number of ranks may give other bits.

Run: pytest ci/unit/models/test_same_bits.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compiled_network import BLOCK_SIZE, needs_compiler
from random_decoders import HEADS, DecoderOnRanks, RandomHeads
from thread_ranks import ThreadRanks
from torch import Tensor

from inflight.layers.attention import AttentionMetadata
from inflight_kernels.cpu import Instruction
from inflight_kernels.cpu.instructions import VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_threads")]

VECTORS = (Instruction.VDPBF16PS, Instruction.FMA, Instruction.FMA_AS_AMX)
"""To be forced, besides what is chosen here."""
HEADS_FOR_RANKS = HEADS[2:4]
"""Heads that two ranks can share; both hold a copy of the first layer's only key head."""
LENGTHS = (560, 140, 41, 7)
"""Tokens of each sequence: parts and steps of attention end inside the first ones."""
LENGTHS_ON_RANKS = (140, 41, 7)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("libraries")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFLIGHT_CACHE_DIR", str(folder))
        yield folder


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence that are computed in one step."""

    sequence: int
    start: int
    count: int
    decodes: bool

    @property
    def end(self) -> int:
        return self.start + self.count


class Sequences:
    """Their tokens and blocks; what a decoder has computed of them."""

    def __init__(self, decoder: DecoderOnRanks, lengths: Sequence[int]) -> None:
        self._decoder = decoder
        for layer in decoder.cache_layers:
            layer.keys.zero_()
            layer.values.zero_()
        generator = torch.Generator().manual_seed(5)
        self._tokens = [torch.randint(0, 203, (length,), generator=generator) for length in lengths]
        self._width = -(-max(lengths) // BLOCK_SIZE)
        blocks = torch.randperm(len(lengths) * self._width, generator=generator, dtype=torch.int32)
        self._table = blocks.view(len(lengths), self._width)
        self.hidden: list[list[Tensor]] = [[] for _ in lengths]

    @torch.inference_mode()
    def compute(self, pieces: list[Piece]) -> None:
        pieces = sorted(pieces, key=lambda piece: not piece.decodes)
        num_decodes = sum(piece.decodes for piece in pieces)
        places = [(piece.sequence, place) for piece in pieces for place in range(piece.start, piece.end)]
        lens = torch.tensor([piece.end for piece in pieces], dtype=torch.int32)
        counts = [piece.count for piece in pieces[num_decodes:]]
        table = self._table[[piece.sequence for piece in pieces]]
        slots = [int(self._table[s, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE for s, at in places]
        metadata = AttentionMetadata(
            positions_T=torch.tensor([place for _, place in places]),
            slot_mapping_T=torch.tensor(slots),
            num_decodes=num_decodes,
            decode_block_table=table[:num_decodes].contiguous(),
            decode_seq_lens_N=lens[:num_decodes],
            num_prefills=len(counts),
            prefill_block_table=table[num_decodes:].contiguous(),
            prefill_seq_lens_P=lens[num_decodes:],
            prefill_start_loc=torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32),
            max_prefill_len=max(counts, default=0),
        )
        tokens = torch.stack([self._tokens[sequence][place] for sequence, place in places])
        hidden = self._decoder.hidden(tokens, metadata)
        for piece, rows in zip(pieces, hidden.split([piece.count for piece in pieces]), strict=True):
            self.hidden[piece.sequence] += rows.clone()

    def cached(self, sequence: int) -> list[Tensor]:
        """Keys and values of each layer, of every rank."""
        blocks = self._table[sequence].long()
        return [tensor[blocks].clone() for layer in self._decoder.cache_layers for tensor in (layer.keys, layer.values)]


def one_by_one(lengths: Sequence[int], sequence: int) -> list[list[Piece]]:
    return [[Piece(sequence, at, 1, decodes=True)] for at in range(lengths[sequence])]


def at_once(lengths: Sequence[int]) -> list[list[Piece]]:
    return [[Piece(sequence, 0, length, decodes=False) for sequence, length in enumerate(lengths)]]


def in_random_steps(lengths: Sequence[int], seed: int) -> list[list[Piece]]:
    """All sequences at once, in chunks, single tokens and pauses by chance."""
    draw = random.Random(seed)
    done, steps = [0] * len(lengths), []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        step = []
        for sequence, length in enumerate(lengths):
            if done[sequence] == length or draw.random() < 0.2:
                continue
            count = min(draw.choice((1, 1, 2, 5, 31, 33, 64, 130, 257)), length - done[sequence])
            step.append(Piece(sequence, done[sequence], count, decodes=count == 1 and draw.random() < 0.7))
            done[sequence] += count
        if step:
            steps.append(step)
    return steps


def compute(decoder: DecoderOnRanks, lengths: Sequence[int], steps: list[list[Piece]]) -> Sequences:
    sequences = Sequences(decoder, lengths)
    for step in steps:
        sequences.compute(step)
    return sequences


def assert_same(found: Sequences, expected: Sequences, sequence: int) -> None:
    assert torch.equal(torch.stack(found.hidden[sequence]), torch.stack(expected.hidden[sequence]))
    for mine, theirs in zip(found.cached(sequence), expected.cached(sequence), strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture
def two_ranks() -> Iterator[ThreadRanks]:
    ranks = ThreadRanks(2)
    yield ranks
    ranks.close()


def force(instruction: Instruction | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if instruction is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, instruction.value)


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
@pytest.mark.parametrize(
    ("heads", "instruction"),
    [*((heads, None) for heads in HEADS), *zip(HEADS, VECTORS, strict=False)],
    ids=str,
)
def test_tokens_have_the_same_bits_however_they_are_computed(
    heads: RandomHeads, instruction: Instruction | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(instruction, monkeypatch)
    assert_same_however_computed(DecoderOnRanks(heads), LENGTHS, monkeypatch)


@needs_compiler
@pytest.mark.parametrize("instruction", [None, *VECTORS], ids=str)
def test_so_they_have_on_two_ranks(
    instruction: Instruction | None, two_ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(instruction, monkeypatch)
    heads = HEADS_FOR_RANKS[instruction is not None]
    assert_same_however_computed(DecoderOnRanks(heads, two_ranks), LENGTHS_ON_RANKS, monkeypatch)
