"""One sequence's text as it streams: whole characters only, cut off where the first stop string begins.

The stop string itself is not part of the output. Tokens are taken one by one, so the text does not depend on how they
were grouped on their way here: pieces put together equal the text of the same request without streaming.
"""

from __future__ import annotations

from inflight.server.text.stop_strings import StopStrings, StopStringSearch
from inflight.server.text.text_decoder import TextDecoder


class Detokenizer:
    """Text of one sequence."""

    def __init__(self, decoder: TextDecoder, stop_strings: StopStrings | None = None, min_tokens: int = 0) -> None:
        """Stop strings are looked for in the text that follows the first `min_tokens` tokens."""
        self._decoder = decoder
        self._search = StopStringSearch(stop_strings) if stop_strings is not None else None
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens taken so far."""
        self.is_stopped = False
        """A stop string was completed; no further token is taken."""

    def push(self, token_ids: list[int]) -> str:
        """Text that these tokens complete. `num_tokens` says how many were taken: a stop string leaves the rest."""
        pieces = []
        for token_id in token_ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            pieces.append(self._cut(self._decoder.push(token_id)))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest, at the sequence's end. May itself complete a stop string."""
        if self.is_stopped:
            return ""
        text = self._cut(self._decoder.flush())
        if self._search is not None and not self.is_stopped:
            text += self._search.flush()
        return text

    def _cut(self, text: str) -> str:
        if self._search is None or self.num_tokens <= self._min_tokens:
            return text
        certain, self.is_stopped = self._search.push(text)
        return certain
