"""One sequence's text as it streams: whole characters only, cut off where the first stop string begins.

The stop string itself is part of the output only if that is asked for. Tokens are decoded one by one, so the text does
not depend on how they were grouped into responses: the pieces joined equal the text of the same request without
streaming.
"""

from __future__ import annotations

from inflight.text.stop_strings import StopStrings, StopStringSearch
from inflight.text.text_decoder import TextDecoder


class Detokenizer:
    """Text of one sequence."""

    __slots__ = ("_decoder", "_keeps_stop_string", "_min_tokens", "_search", "is_stopped", "num_tokens")

    def __init__(
        self,
        decoder: TextDecoder,
        stop_strings: StopStrings | None = None,
        min_tokens: int = 0,
        *,
        keeps_stop_string: bool = False,
    ) -> None:
        """Stop strings are searched in the text that follows the first `min_tokens` tokens."""
        self._decoder = decoder
        self._search = StopStringSearch(stop_strings) if stop_strings is not None else None
        self._min_tokens = min_tokens
        self._keeps_stop_string = keeps_stop_string
        self.num_tokens = 0
        """Tokens decoded so far."""
        self.is_stopped = False
        """Whether a stop string was completed; further tokens are ignored."""

    @property
    def may_stop(self) -> bool:
        """Whether stop strings are searched."""
        return self._search is not None

    @property
    def stop_string(self) -> str:
        """The stop string that was completed; "" if none was."""
        return "" if self._search is None else self._search.found

    def push(self, token_ids: list[int]) -> str:
        """The text that these tokens complete. Tokens after a stop string are ignored: `num_tokens` grows by those that
        were decoded."""
        if self._search is None:
            self.num_tokens += len(token_ids)
            push = self._decoder.push
            return push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))
        pieces = []
        for token_id in token_ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            pieces.append(self._cut(self._decoder.push(token_id)))
        return "".join(pieces)

    def flush(self) -> str:
        """The text that is still held back, at the sequence's end. It may itself complete a stop string."""
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
        return certain + self._search.found if self._keeps_stop_string else certain
