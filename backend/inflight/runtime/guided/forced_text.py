"""The tokens of text that a grammar forces, as the model probably writes it: drafts, which are verified like any."""

from __future__ import annotations

import numpy as np

from inflight.runtime.guided.library import GrammarLibrary, GrammarRefused, State, Words
from inflight.runtime.guided.vocabulary import Vocabulary

MAX_FORCED = 32
"""Forced tokens that are found at once."""
MAX_CHARACTERS = 16 * MAX_FORCED
"""Of the text that is split into tokens at once."""
ANCHOR = "\n"
"""Stands before the text where it is split. Some tokenizers write a space before a text's beginning; none merges this
with what follows in the middle of a text."""


class ForcedText:
    """Finds the forced tokens of outputs. Used by one thread."""

    def __init__(self, vocabulary: Vocabulary, library: GrammarLibrary) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._library = library
        self._num_bytes = vocabulary.num_bytes
        self._words: Words = np.zeros((1, -(-len(vocabulary.num_bytes) // 32)), dtype=np.uint32)
        self._anchor = vocabulary.tokenizer.encode(ANCHOR, add_special_tokens=False).ids

    def next_tokens(self, state: State) -> list[int]:
        """At most MAX_FORCED. Changes nothing of the state.

        The text is split as the tokenizer splits it, because models were trained on that. Its last token is left out if
        the grammar allows one that goes on behind the forced text: such a token is the likelier one.
        """
        text = state.forced_text()
        if len(text) < 2:
            return []
        num_accepted = 0
        token_ids = self._split(text[:MAX_CHARACTERS])
        try:
            for token_id in token_ids[:MAX_FORCED]:
                if not state.accept(token_id):
                    break
                num_accepted += 1
            token_ids = token_ids[:num_accepted]
            if token_ids:
                state.rollback(1)
                num_accepted -= 1
                if self._goes_on(state, token_ids[-1]):
                    del token_ids[-1]
        except GrammarRefused:
            token_ids = []
        if num_accepted:
            state.rollback(num_accepted)
        return token_ids

    def _split(self, text: str) -> list[int]:
        """No tokens where the anchor is no token of its own."""
        try:
            token_ids: list[int] = self._tokenizer.encode(ANCHOR + text, add_special_tokens=False).ids
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of the library, in Rust
                raise
            return []
        length = len(self._anchor)
        return token_ids[length:] if token_ids[:length] == self._anchor else []

    def _goes_on(self, state: State, token_id: int) -> bool:
        """Whether a longer token is allowed in the place of this one, which ends the forced text."""
        self._library.fill([state], self._words)
        allowed = np.unpackbits(self._words[0].view(np.uint8), bitorder="little", count=len(self._num_bytes))
        return bool(self._num_bytes[allowed.view(bool)].max(initial=0) > self._num_bytes[token_id])
