"""How many of a choice's tokens are reasoning, its tags included."""

from __future__ import annotations

from inflight.asking.reasoning import Splitter
from inflight.asking.tools.events import Reasoning
from inflight.text.text_decoder import TextDecoder


class ReasoningTokens:
    """Decodes the tokens one by one once more, because their text comes in groups. Behind the reasoning it costs
    nothing."""

    def __init__(self, decoder: TextDecoder, splitter: Splitter) -> None:
        """Both fresh, and as the choice's text is made."""
        self._decoder, self._splitter = decoder, splitter
        self._num_pending = 0
        """Tokens that belong to what comes next: to the reasoning, if it is one."""
        self.count = 0
        """Of the tokens so far."""

    def add(self, token_ids: list[int]) -> None:
        splitter = self._splitter
        for token_id in token_ids:
            if not splitter.may_reason:
                return
            was_reasoning = splitter.is_reasoning
            parts = splitter.feed(self._decoder.push(token_id))
            self._num_pending += 1
            if was_reasoning or splitter.is_reasoning or any(isinstance(part, Reasoning) for part in parts):
                self.count += self._num_pending
                self._num_pending = 0
            elif parts:
                self._num_pending = 0
