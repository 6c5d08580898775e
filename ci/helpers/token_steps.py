"""Sequences of tokens that a decoder computes in steps of any kind, to be compared bit by bit.

Sequences have as many tokens as `lengths` says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compiled_network import BLOCK_SIZE
from random_decoders import DecoderOnRanks
from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight_kernels.kv_cache.step_blocks import StepBlocks


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
        for tensor in decoder.kept_tensors:
            tensor.zero_()
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
        rows = torch.tensor([piece.sequence for piece in pieces])
        slots = [int(self._table[s, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE for s, at in places]
        metadata = AttentionMetadata(
            positions_T=torch.tensor([place for _, place in places]),
            blocks=(StepBlocks(torch.tensor(slots), self._table),),
            num_decodes=num_decodes,
            decode_rows_N=rows[:num_decodes],
            decode_seq_lens_N=lens[:num_decodes],
            num_prefills=len(counts),
            prefill_rows_P=rows[num_decodes:],
            prefill_seq_lens_P=lens[num_decodes:],
            prefill_start_loc=torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32),
            max_prefill_len=max(counts, default=0),
        )
        tokens = torch.stack([self._tokens[sequence][place] for sequence, place in places])
        hidden = self._decoder.hidden(tokens, metadata)
        for piece, rows in zip(pieces, hidden.split([piece.count for piece in pieces]), strict=True):
            self.hidden[piece.sequence] += rows.clone()

    def cached(self, sequence: int) -> list[Tensor]:
        """The bytes that each layer has stored, of every rank."""
        blocks = self._table[sequence].long()
        tensors = self._decoder.kept_tensors
        return [tensor.view(torch.uint8)[blocks] for tensor in tensors]


Steps = list[list[Piece]]


def one_by_one(lengths: Sequence[int], sequence: int) -> Steps:
    """One sequence alone, a token a step."""
    return [[Piece(sequence, at, 1, decodes=True)] for at in range(lengths[sequence])]


def at_once(lengths: Sequence[int]) -> Steps:
    """All sequences as whole prompts."""
    return [[Piece(sequence, 0, length, decodes=False) for sequence, length in enumerate(lengths)]]


def in_random_steps(lengths: Sequence[int], seed: int) -> Steps:
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


def compute(decoder: DecoderOnRanks, lengths: Sequence[int], steps: Steps) -> Sequences:
    sequences = Sequences(decoder, lengths)
    for step in steps:
        sequences.compute(step)
    return sequences


def assert_same(found: Sequences, expected: Sequences, sequence: int) -> None:
    assert torch.equal(torch.stack(found.hidden[sequence]), torch.stack(expected.hidden[sequence]))
    for mine, theirs in zip(found.cached(sequence), expected.cached(sequence), strict=True):
        assert torch.equal(mine, theirs)


def attend_to_exact_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make prompts do what they must not with a cache of 8 bits: attend to the keys and values of their own step as
    they are before they are rounded. Later steps find them rounded."""
    write, attend = inflight_kernels.rope_and_kv_write, inflight_kernels.prefill_attention
    exact: list[Tensor] = []

    def note_and_write(q: Tensor, *others: Any) -> Tensor:
        before, (k_cache, v_cache), between, scales = others[:4], others[4:6], others[6:10], others[10:12]
        exact[:] = [
            (cache.float() * (scale[..., None] if isinstance(scale, Tensor) else scale)).to(q.dtype)
            for cache, scale in zip((k_cache, v_cache), scales, strict=True)
        ]
        write(q, *before, *exact, *between, 1.0, 1.0, *others[12:])
        return write(q, *others)

    def attend_to_noted(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any, **options: Any) -> Tensor:
        return attend(q, *exact, *others, **{**options, "k_scale": 1.0, "v_scale": 1.0})

    monkeypatch.setattr(inflight_kernels, "rope_and_kv_write", note_and_write)
    monkeypatch.setattr(inflight_kernels, "prefill_attention", attend_to_noted)
