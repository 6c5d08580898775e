"""What is asked of a library of grammars: one that compiles them, and says which tokens may come next.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inflight.guided_decoding import GuidedDecodingParams

Words = npt.NDArray[np.uint32]
"""Masks: (rows, V bits and more in words of 32), lowest bit first."""


class GrammarRefused(Exception):
    """A grammar is not served, or not any further; the message is the sentence for the client."""


class State(Protocol):
    """Where an output stands in its grammar. Used by one thread at a time."""

    def accept(self, token_id: int) -> bool:
        """Take one more token in, or return False and change nothing: the grammar forbids it. Raises GrammarRefused."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""

    def forced_text(self) -> str:
        """What the output must go on with, whole characters only; empty if it has a choice, or may end. Changes
        nothing."""


class Compiled(Protocol):
    """A grammar. Used by any thread."""

    def start(self) -> State:
        """That of an output without tokens."""


class GrammarLibrary(Protocol):
    """Of one vocabulary."""

    def compile(self, params: GuidedDecodingParams) -> Compiled:
        """Raises GrammarRefused. May be called beside everything else, from one thread."""

    def fill(self, states: Sequence[State], words: Words) -> list[tuple[bool, str]]:
        """Write a row of bits for each state: the tokens that it allows next, of text alone. Returns for each whether
        its output may end there, and why it cannot go on ("" = it can). From one thread."""
