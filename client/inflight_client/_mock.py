"""A transport without a server, in which a function acts as the model. For tests of this package and of its users.

def model(call: Call) -> Iterable[Reply]:
    yield text_reply("Hello")
    yield text_reply(" world", finish_reason="stop", final=True)

client = Client(transport=MockTransport(model))
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from inflight_client._exceptions import error_from_status
from inflight_client._transport import Call, Reply, strings

Handler = Callable[[Call], Iterable[Reply]]


def text_reply(
    text: str,
    *,
    token_ids: Sequence[int] = (),
    finish_reason: str = "",
    sequence_index: int | None = None,
    final: bool = False,
) -> Reply:
    """A reply as the model `llm` sends it; with the index of a sequence to requests that ask for several."""
    outputs = {
        "text_output": strings((text,)),
        "output_ids": np.array([list(token_ids)], np.int32),
        "sequence_length": np.array([len(token_ids)], np.int32),
        "finish_reason": strings((finish_reason,)),
    }
    if sequence_index is not None:
        outputs["sequence_index"] = np.array([sequence_index], np.int32)
    return Reply(outputs=outputs, final=final)


class _MockReplyStream:
    """Yields replies of the handler one by one; once cancelled it raises Cancelled, as a server's stream does."""

    def __init__(self, call: Call, replies: Iterable[Reply]) -> None:
        self._call = call
        self._replies = replies
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    def __iter__(self) -> Iterator[Reply]:
        for reply in self._replies:
            if self.cancelled:
                raise error_from_status("CANCELLED", "Locally cancelled", request_id=self._call.request_id)
            yield reply

    async def __aiter__(self) -> AsyncIterator[Reply]:
        for reply in self:
            await asyncio.sleep(0)
            yield reply


class _MockServer:
    """Base of both mock transports. `calls` and `streams` record everything that was opened, in order."""

    def __init__(self, handler: Handler, *, ready: bool = True, config: dict[str, Any] | None = None) -> None:
        self._handler = handler
        self._config = config or {}
        self.ready = ready
        self.closed = False
        self.calls: list[Call] = []
        self.streams: list[_MockReplyStream] = []

    def open(self, call: Call) -> _MockReplyStream:
        stream = _MockReplyStream(call, self._handler(call))
        self.calls.append(call)
        self.streams.append(stream)
        return stream


class MockTransport(_MockServer):
    """Answers Client's calls with the replies that `handler` yields; its exceptions are raised to the caller."""

    def model_ready(self, model: str, timeout: float) -> bool:
        return self.ready

    def model_config(self, model: str, timeout: float) -> dict[str, Any]:
        return self._config

    def close(self) -> None:
        self.closed = True


class AsyncMockTransport(_MockServer):
    """The same for AsyncClient."""

    async def model_ready(self, model: str, timeout: float) -> bool:
        return self.ready

    async def model_config(self, model: str, timeout: float) -> dict[str, Any]:
        return self._config

    async def close(self) -> None:
        self.closed = True
