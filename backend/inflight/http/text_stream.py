"""The short way from a response to a chunk, which nearly every token goes: of a stream of one choice whose chunks hold
its text and nothing else.

    token ids ─> text ─> data: {…,"choices":[{"index":0,"text":  + the text as JSON +  ,"logprobs":null,…}]}

What ends the choice goes the long way, through Generation and StreamedAnswer, which make the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from inflight.http.choice import Choice
from inflight.http.dispatcher import Hear
from inflight.result import Response

_encode = msgspec.json.Encoder().encode


class TextStream(ABC):
    """The chunks of one stream, until what ends its choice."""

    __slots__ = ("_choice", "_fail", "_long_way")

    def __init__(self, choice: Choice, long_way: Hear, fail: Callable[[Exception], bytes]) -> None:
        """`long_way`: for what ends the choice. `fail`: for an error in a token's text."""
        self._choice, self._long_way, self._fail = choice, long_way, fail

    @abstractmethod
    def chunk(self, text: str) -> bytes:
        """Of text that has come, not empty."""

    def hear(self, responses: list[Response]) -> bytes:
        """The bytes of responses that have come at once."""
        last = responses[-1].result  # no other one can end the choice
        if last is None or last.finish_reason:
            return self._long_way(responses)
        token_ids = last.output_token_ids
        if len(responses) > 1:
            token_ids = [token for each in responses if each.result for token in each.result.output_token_ids]
        try:
            text = self._choice.extend(token_ids)
        except Exception as error:
            return self._fail(error)
        return self.chunk(text) if text else b""


class FramedText(TextStream):
    """One whose chunks differ in their text alone."""

    __slots__ = ("_head", "_tail")

    def __init__(
        self, choice: Choice, head: bytes, tail: bytes, long_way: Hear, fail: Callable[[Exception], bytes]
    ) -> None:
        """`head`, `tail`: what stands in every chunk before and behind the text as JSON."""
        super().__init__(choice, long_way, fail)
        self._head, self._tail = head, tail

    def chunk(self, text: str) -> bytes:
        return b"".join((self._head, _encode(text), self._tail))
