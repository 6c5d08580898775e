"""The tokens of text that a grammar forces, as the model probably writes it: drafts, which are verified like any."""

from __future__ import annotations

import numpy as np
import xgrammar

from inflight.runtime.guided.messages import MAX_FORCED
from inflight.runtime.guided.vocabulary import Vocabulary

MAX_CHARACTERS = 16 * MAX_FORCED
"""Of the text that is split into tokens at once."""
ANCHOR = "\n"
"""Stands before the text where it is split. Some tokenizers write a space before a text's beginning; none merges this
with what follows in the middle of a text."""


class ForcedText:
    """Finds the forced tokens of outputs that follow one grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._num_bytes = vocabulary.num_bytes
        self._words = np.zeros((1, -(-len(vocabulary.num_bytes) // 32)), dtype=np.int32)
        self._anchor = vocabulary.tokenizer.encode(ANCHOR, add_special_tokens=False).ids

    def next_tokens(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        """At most MAX_FORCED. Changes nothing of the matcher, unless it raises what the library raises.

        The text is split as the tokenizer splits it, because models were trained on that. Its last token is left out if
        the grammar allows one that goes on behind the forced text: such a token is the likelier one.
        """
        try:
            text = matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # it ends within a character
            return []
        if len(text) < 2:
            return []
        num_accepted = 0
        token_ids = self._split(text[:MAX_CHARACTERS])
        for token_id in token_ids[:MAX_FORCED]:
            if not matcher.accept_token(token_id):
                break
            num_accepted += 1
        token_ids = token_ids[:num_accepted]
        if token_ids:
            matcher.rollback(1)
            num_accepted -= 1
            if self._goes_on(matcher, token_ids[-1]):
                del token_ids[-1]
        if num_accepted:
            matcher.rollback(num_accepted)
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

    def _goes_on(self, matcher: xgrammar.GrammarMatcher, token_id: int) -> bool:
        """Whether a longer token is allowed in the place of this one, which ends the forced text."""
        matcher.fill_next_token_bitmask(self._words, 0)
        allowed = np.unpackbits(self._words[0].view(np.uint8), bitorder="little", count=len(self._num_bytes))
        return bool(self._num_bytes[allowed.view(bool)].max(initial=0) > self._num_bytes[token_id])
