"""How answers are written: each dialect writes them in two ways, whole and as a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from inflight.http.api_error import APIError
from inflight.http.call import Call
from inflight.http.dispatcher import Hear
from inflight.http.generation import Generation, News
from inflight.http.text_stream import TextStream


class Whole(Protocol):
    """An answer that is sent when it is complete."""

    def add(self, news: News) -> None: ...

    def fields(self) -> dict[str, Any]:
        """The body, once all choices have ended."""


class Streamed(Protocol):
    """An answer that is sent while it grows. All that it returns is written at once."""

    def open(self) -> bytes:
        """What comes before the first text."""

    def add(self, news: News) -> bytes:
        """The events of new tokens; with the last of them all that ends the stream."""

    def text_stream(self, long_way: Hear, fail: Callable[[Exception], bytes]) -> TextStream | None:
        """The short way for what comes now, if there is one; see TextStream."""

    def fail(self, error: APIError) -> bytes:
        """What ends a stream that cannot go on."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Of one dialect."""

    whole: Callable[[Call, Generation], Whole]
    stream: Callable[[Call, Generation], Streamed]
    content_type: bytes = b"text/event-stream; charset=utf-8"
    """Of a stream."""
