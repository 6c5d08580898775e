"""Answers drawn at random from the masks of a guide, without a network: what a model could write at any temperature,
with a bias to what ends strings, lists and objects, so that most answers end."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inflight.runtime.guided.library import Compiled, GrammarLibrary, State, Words
from inflight.runtime.guided.vocabulary import Vocabulary

MAX_TOKENS = 400
END_SHARE = 0.6
"""How often an answer ends that may end and may go on."""
LETTER = b"z"
"""That none of JSON's own words has: where it is allowed, the answer is within a string."""


@dataclass(frozen=True)
class Answer:
    text: str
    has_ended: bool
    """By itself; False: it was cut at the most tokens, or met a limit of the library."""
    error: str = ""
    """Why it could not go on."""


class Draws:
    """Tokens drawn from masks of one vocabulary, which has all single bytes."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self.texts = vocabulary.texts
        self._random = random.Random(seed)
        self._letter = self.texts.index(LETTER)
        self._has_quote = np.array([b'"' in text for text in self.texts])
        self._has_bracket = np.array([b"}" in text or b"]" in text for text in self.texts])

    def token(self, row: Words, num_tokens: int) -> int | None:
        """One that the mask `row` allows, None if it allows none. The more tokens an answer has, the more often it
        is one that closes a string or, outside of strings, an object or a list."""
        allowed = allowed_tokens(row, len(self.texts))
        if not len(allowed):
            return None
        closes = (self._has_quote if self._letter in allowed else self._has_bracket)[allowed]
        wants_to_close = self._random.random() < min(0.2 + num_tokens / MAX_TOKENS, 0.8)
        group = allowed[closes == wants_to_close]
        group = group if len(group) else allowed
        return int(group[self._random.randrange(len(group))])

    def ends(self) -> bool:
        """Whether an answer ends that may."""
        return self._random.random() < END_SHARE


def allowed_tokens(row: Words, vocab_size: int) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little", count=vocab_size))


def answer(library: GrammarLibrary, grammar: Compiled, draws: Draws, max_tokens: int = MAX_TOKENS) -> Answer:
    """Raises UnicodeDecodeError if the masks led to bytes that are no text."""
    state: State = grammar.start()
    words = np.zeros((1, -(-len(draws.texts) // 32)), dtype=np.uint32)
    pieces: list[bytes] = []
    while len(pieces) < max_tokens:
        ((may_end, error),) = library.fill([state], words)
        if error:
            return Answer(_cut(pieces), False, error)
        token = None if may_end and draws.ends() else draws.token(words[0], len(pieces))
        if token is None:
            assert may_end, "the masks led to where nothing is allowed"
            return Answer(b"".join(pieces).decode(), True)
        assert state.accept(token), "a token that the mask allows was refused"
        pieces.append(draws.texts[token])
    return Answer(_cut(pieces), False)


def _cut(pieces: list[bytes]) -> str:
    return b"".join(pieces).decode(errors="replace")
