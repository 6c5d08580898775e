"""Sends an answer over ASGI: whole or as a stream, and cancels its requests when the client is gone.

A stream's status and headers are sent with its first tokens, so that what fails before has a status of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec
from starlette.types import Receive, Scope, Send

from inflight.openai.answer import WholeAnswer
from inflight.openai.api_error import APIError
from inflight.openai.call import Call
from inflight.openai.dispatcher import ClientGone, Mailbox
from inflight.openai.endpoint import unexpected
from inflight.openai.frames import DONE, error_frame
from inflight.openai.generation import Generation
from inflight.openai.metrics import ServerMetrics
from inflight.openai.stream import StreamedAnswer

JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


class Responder:
    """Of one call that was sent to the engine."""

    def __init__(
        self, call: Call, request_ids: list[int], mailbox: Mailbox, metrics: ServerMetrics, began: float
    ) -> None:
        """`began`: when its HTTP request arrived, on the monotonic clock."""
        self._call = call
        self._mailbox = mailbox
        self._generation = Generation(call, request_ids, mailbox)
        self._metrics = metrics
        self._began = began

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the HTTP status. Raises APIError as long as nothing was sent, and ClientGone."""
        watching = asyncio.create_task(_watch(receive, self._mailbox.abandon))
        try:
            return await (self._stream(send) if self._call.is_streamed else self._whole(send))
        finally:
            watching.cancel()
            self._mailbox.close()
            self._metrics.count_tokens(self._call.num_prompt_tokens, self._generation.num_tokens)

    async def _whole(self, send: Send) -> int:
        answer, generation = WholeAnswer(self._call, self._generation), self._generation
        while not generation.is_done:
            answer.add(generation.add(await self._mailbox.take()))
        body = _encode(answer.fields())
        headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return 200

    async def _stream(self, send: Send) -> int:
        generation, take = self._generation, self._mailbox.take
        news = generation.add(await take())
        self._metrics.observe_first_token(time.monotonic() - self._began)
        answer = StreamedAnswer(self._call, generation)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        body = answer.open()
        while True:
            body += answer.add(news)
            is_done = generation.is_done
            if body or is_done:
                await send({"type": "http.response.body", "body": body, "more_body": not is_done})
            if is_done:
                return 200
            body = b""
            try:
                news = generation.add(await take())
            except ClientGone:
                raise
            except Exception as error:
                failure = error if isinstance(error, APIError) else unexpected(error)
                await send({"type": "http.response.body", "body": error_frame(failure) + DONE})
                return failure.status


async def _watch(receive: Receive, gone: Callable[[], None]) -> None:
    """Wait until the client closes its connection, or has the whole answer."""
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            continue
        gone()
