"""The numbers of one beam search: which beams go on, which are finished, and when there is nothing left to improve.

The algorithm is that of transformers' `generate(num_beams=w)` for one prompt. Sums and scores are float32 as there, so
that the same log probabilities lead to the same beams. A diversity rate and widths that change from step to step are
TensorRT-LLM's: the rate orders the continuations of all beams and is part of no sum or score, and a step's width is the
number of beams that go on, and of the best continuations among which hypotheses may end.

Knows no blocks, rows or tensors: a beam is named by its *slot*, 0 <= slot < width, and a child stays in the slot of its
parent if it is the parent's best.

All ranks choose alike, because they sample from the same gathered logits, as for every other token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from inflight.result import FinishReason

HEURISTIC, WHEN_FULL = 0, 1
"""Values of SamplingConfig.early_stopping; all others mean NEVER."""

CERTAIN = np.float32(0)
"""Log probability of a text without tokens."""


def num_candidates(width: int, num_end_ids: int) -> int:
    """Tokens of each beam to choose from: with so many, `width` beams go on even if all end tokens are among them."""
    return max(2, 1 + num_end_ids) * width


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The likeliest tokens after one beam, falling, equal ones by token id."""

    token_ids: list[int]
    log_probs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """Generated tokens and their probability; of a hypothesis if `reason` says why it ended."""

    slot: int = 0
    parent: int = 0
    """Slot of the beam that its last token was appended to."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    total: np.float32 = CERTAIN
    """Sum of `log_probs`, one after the other."""
    reason: FinishReason = FinishReason.NOT_FINISHED

    def score(self, length_penalty: float) -> np.float32:
        return _score(self.total, len(self.token_ids), length_penalty)


def _score(total: np.float32, length: int, length_penalty: float) -> np.float32:
    """The sum of log probabilities, divided by length ** length_penalty; end tokens count as length."""
    return np.float32(total / np.float32(max(length, 1) ** length_penalty))


class BeamSearch:
    """`beams` are those that go on, the best first. At the beginning there is one, the prompt, in slot 0."""

    def __init__(
        self,
        *,
        width: int,
        length_penalty: float,
        early_stopping: int,
        end_ids: frozenset[int],
        max_tokens: int,
        widths: Sequence[int] = (),
        diversity_rate: float = 0.0,
        stop_words: Mapping[int, list[list[int]]] | None = None,
        min_tokens: int = 0,
    ) -> None:
        """`max_tokens`: length of the longest hypothesis. `widths`: see SamplingConfig.beam_width_array. `stop_words`:
        by their last token; they end no text of fewer than `min_tokens` tokens."""
        self.beams = [Beam()]
        self.hypotheses: list[Beam] = []
        """At most `width`, the best first."""
        self.is_done = False
        self._width = width
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._widths = widths or (width,)
        self._diversity_rate = np.float32(diversity_rate)
        self._stop_words = stop_words or {}
        self._min_tokens = min_tokens

    def advance(self, candidates: dict[int, Candidates]) -> None:
        """Choose the next beams. `candidates`: of each of `beams`, by slot."""
        length = len(self.beams[0].token_ids) + 1
        width = self._widths[min(length, len(self._widths)) - 1]
        found = self._best(candidates, width)
        ended = [self._reason(beam, token_id, length) for _, beam, token_id, _ in found]
        for place, (total, beam, token_id, log_prob) in enumerate(found[:width]):
            if ended[place]:
                self._keep(_grown(beam, 0, token_id, log_prob, total, ended[place]))
        going_on = [choice for choice, reason in zip(found, ended, strict=True) if not reason][:width]
        if not going_on:
            self.is_done = True
            return
        best = max(total for total, _, _, _ in going_on)
        self.beams = self._placed(going_on)
        is_full = len(self.hypotheses) == self._width
        self.is_done = is_full and (self._early_stopping == WHEN_FULL or not self._can_improve(best, length))

    def results(self, count: int) -> list[Beam]:
        """The `count` best hypotheses; if the search was ended early or found fewer, unfinished beams behind them."""
        unfinished = sorted(self.beams, key=lambda beam: -beam.score(self._length_penalty))
        return [*self.hypotheses, *unfinished][:count]

    def _best(self, candidates: dict[int, Candidates], width: int) -> list[tuple[np.float32, Beam, int, float]]:
        """(sum, parent, token, its log probability) of the likeliest continuations of all beams, the best first.

        To a sum counts the diversity that its parent's rank adds. Equal ones are ordered by this rank and the token. A
        token of probability 0 continues nothing.
        """
        choices = [
            (beam.total + np.float32(log_prob), rank, token_id, log_prob)
            for rank, beam in enumerate(self.beams)
            for token_id, log_prob in zip(candidates[beam.slot].token_ids, candidates[beam.slot].log_probs, strict=True)
            if log_prob > -np.inf
        ]
        bonus = [self._diversity_rate * np.float32(rank) for rank in range(len(self.beams))]
        choices.sort(key=lambda choice: (-(choice[0] + bonus[choice[1]]), choice[1], choice[2]))
        kept = choices[: num_candidates(width, len(self._end_ids))]
        return [(total, self.beams[rank], token_id, log_prob) for total, rank, token_id, log_prob in kept]

    def _reason(self, beam: Beam, token_id: int, length: int) -> FinishReason:
        if token_id in self._end_ids:
            return FinishReason.END_ID
        words = self._stop_words.get(token_id, []) if length >= self._min_tokens else []
        if any([*beam.token_ids, token_id][-len(word) :] == word for word in words):
            return FinishReason.STOP_WORDS
        return FinishReason.LENGTH if length >= self._max_tokens else FinishReason.NOT_FINISHED

    def _keep(self, hypothesis: Beam) -> None:
        """Among equal scores the one that was found first stays first."""
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda kept: -kept.score(self._length_penalty))
        del self.hypotheses[self._width :]

    def _placed(self, chosen: list[tuple[np.float32, Beam, int, float]]) -> list[Beam]:
        """The chosen beams with slots: the best child of a beam stays in its slot, the others take what is left."""
        staying = {beam.slot for _, beam, _, _ in chosen}
        left = [slot for slot in range(self._width) if slot not in staying]
        beams: list[Beam] = []
        for total, parent, token_id, log_prob in chosen:
            if parent.slot in staying:
                staying.remove(parent.slot)
                slot = parent.slot
            else:
                slot = left.pop(0)
            beams.append(_grown(parent, slot, token_id, log_prob, total))
        return beams

    def _can_improve(self, best: np.float32, length: int) -> bool:
        """Whether the best beam, with this sum and length, could still be better than the worst hypothesis.

        Its later tokens only lower the sum. How much a longer text divides it by is not known: the heuristic takes the
        present length, NEVER the one that is best for it.
        """
        if self._early_stopping not in (HEURISTIC, WHEN_FULL) and self._length_penalty > 0:
            length = self._max_tokens
        return bool(_score(best, length, self._length_penalty) > self.hypotheses[-1].score(self._length_penalty))


def _grown(
    parent: Beam,
    slot: int,
    token_id: int,
    log_prob: float,
    total: np.float32,
    reason: FinishReason = FinishReason.NOT_FINISHED,
) -> Beam:
    return Beam(
        slot=slot,
        parent=parent.slot,
        token_ids=[*parent.token_ids, token_id],
        log_probs=[*parent.log_probs, log_prob],
        total=total,
        reason=reason,
    )
