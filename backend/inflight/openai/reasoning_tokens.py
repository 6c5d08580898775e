"""How many of a choice's tokens are reasoning: those up to the one that completes the closing tag."""

from __future__ import annotations

from inflight.openai.reasoning import ReasoningSplitter
from inflight.text.text_decoder import TextDecoder


class ReasoningTokens:
    """Decodes the tokens one by one once more, because their text comes in groups. Behind the reasoning it costs
    nothing."""

    def __init__(self, decoder: TextDecoder, splitter: ReasoningSplitter) -> None:
        """Both fresh, and as the choice's text is made."""
        self._decoder, self._splitter = decoder, splitter
        self._num_seen = 0
        self._has_reasoning = False

    @property
    def count(self) -> int:
        """Of the tokens so far."""
        return self._num_seen if self._has_reasoning else 0

    def add(self, token_ids: list[int]) -> None:
        splitter = self._splitter
        for token_id in token_ids:
            if not splitter.may_reason:
                return
            reasoning, _ = splitter.feed(self._decoder.push(token_id))
            self._has_reasoning |= bool(reasoning) or splitter.is_reasoning
            self._num_seen += 1
