"""Drafts that the model has made itself: lookahead decoding (Fu et al. 2024).

A step brings, behind the sequence's last token, an n-gram of the pool that begins with that token, and behind it the
window: guesses of the tokens that come next. What the model samples in the place behind a wrong draft is no token of
the output, but a better guess of the one at that position (Jacobi iteration), so it is the window of the next step. The
guesses at the positions p, p + 1, ... of steps that follow each other are a diagonal of their windows: each was
generated behind the one before. Diagonals of `max_ngram_size` guesses go to the pool, and so do accepted tokens.

It differs from the paper in what a step computes. There the window has several levels, and all n-grams of the
verification set are verified at once, each apart from the others by a mask of attention. Here all drafts are one chain,
because each attends to all before it: one n-gram is verified at a time, that of the verification set which agrees best
with the window, and the window stands behind it.
"""

from __future__ import annotations

from inflight.batch_manager.speculation.drafter import NO_DRAFTS
from inflight.batch_manager.speculation.ngram_pool import NGramPool
from inflight.batch_manager.speculation.payoff import TOKEN_GAIN, Payoff
from inflight.speculative_decoding import LookaheadDecodingConfig

FILLER_STRIDE = 7919
"""A window without guesses begins with tokens of the text, which are as likely as any others: at position p that of
number FILLER_STRIDE * p, counted around. A prime, so that neighbours come from different places."""


WINDOW_COST = 3
"""What a step's window must earn, in fifths of a step, whatever its size: those who ask for one know their device. With
0.9 accepted drafts a step the default model, alone on one CPU core, takes 0.77 of the CPU time that it takes without; a
network of 135 M parameters would take a tenth more, as each of its drafts costs a fifth of a step there."""
SEQUENCES_OF_WINDOW_COST = 4
"""So many more sequences in the batch add another WINDOW_COST."""
FIRST_COST = 60
"""What may be spent besides, before the pool has n-grams."""


class Lookahead:
    """A Drafter. Its memory is that of a window and of a pool, however long the text."""

    __slots__ = ("_diagonals", "_ngram_size", "_payoff", "_pool", "_window_size")

    def __init__(self, config: LookaheadDecodingConfig) -> None:
        self._window_size = config.max_window_size
        self._ngram_size = config.max_ngram_size
        self._pool = NGramPool(config.max_verification_set_size)
        self._payoff = Payoff(self._window_size + self._ngram_size - 1, allowance=FIRST_COST)
        self._diagonals: dict[int, tuple[int, ...]] = {}  # position -> its guess, after those that led to it

    def propose(self, token_ids: list[int], num_pending: int, most: int) -> list[int]:
        length = len(token_ids)
        if most <= 0 or self._payoff.is_resting(length):
            return NO_DRAFTS
        last, window = token_ids[-1], self._diagonals
        expected = [window[place][-1] for place in range(length, length + self._ngram_size - 1) if place in window]
        following = self._pool.find(last, expected)
        end = length + min(num_pending + most, len(following) + self._window_size)
        drafted = {length + index: (last, *following[: index + 1]) for index in range(len(following))}
        self._diagonals = {
            place: drafted.get(place) or window.get(place) or (token_ids[FILLER_STRIDE * place % length],)
            for place in range(length, end)
        }
        return [self._diagonals[place][-1] for place in range(length + num_pending, end)]

    def account(self, num_drafts: int, num_accepted: int, num_tokens: int, num_running: int) -> None:
        cost = WINDOW_COST * (1 + num_running // SEQUENCES_OF_WINDOW_COST)
        self._payoff.add(TOKEN_GAIN * num_accepted - cost, num_tokens)

    def learn(self, token_ids: list[int], num_new: int, guesses: list[int]) -> None:
        """A step has verified its drafts: of `token_ids` the last `num_new` are new, and `guesses` is what it sampled
        behind them, each in the place of a draft that followed a wrong one, or was wrong."""
        size, former = self._ngram_size, self._diagonals
        self._diagonals = {
            place: (*former.get(place - 1, ()), guess)[-size:] for place, guess in enumerate(guesses, len(token_ids))
        }
        for diagonal in self._diagonals.values():
            if len(diagonal) == size:
                self._pool.add(diagonal)
        for end in range(max(len(token_ids) - num_new + 1, size), len(token_ids) + 1):
            self._pool.add(tuple(token_ids[end - size : end]))
