"""Sends an answer over ASGI: whole or as a stream, and cancels its requests when the client is gone.

A stream's status and headers are sent with its first tokens, so that what fails before has a status of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
from starlette.types import Receive, Scope, Send

from inflight.executor.front.front import SHUT_DOWN
from inflight.http.api_error import APIError, overloaded
from inflight.http.call import Call
from inflight.http.chunks import chunk_writer
from inflight.http.dispatcher import ClientGone, Mailbox
from inflight.http.endpoint import CLIENT_GONE, unexpected
from inflight.http.generation import Generation
from inflight.http.metrics import ModelMetrics
from inflight.http.rendering import Rendering, Streamed
from inflight.http.trace import ended_call
from inflight.request_spans import RequestSpans
from inflight.result import Response

JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


class Responder:
    """Of one call that was sent to the engine."""

    def __init__(
        self,
        call: Call,
        request_ids: list[int],
        mailbox: Mailbox,
        metrics: ModelMetrics,
        rendering: Rendering,
        began: float,
        spans: RequestSpans | None = None,
    ) -> None:
        """`began`: when its HTTP request arrived, on the monotonic clock. `spans`: None = none are made."""
        self._call = call
        self._mailbox = mailbox
        self._generation = Generation(call, request_ids, mailbox)
        self._metrics = metrics
        self._rendering = rendering
        self._began = began
        self._spans = spans

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the HTTP status. Raises APIError as long as nothing was sent, and ClientGone."""
        if self._spans is None:
            return await self._respond(scope, receive, send)
        status = 500
        try:
            status = await self._respond(scope, receive, send)
        except APIError as error:
            status = error.status
            raise
        except ClientGone:
            status = CLIENT_GONE
            raise
        finally:
            self._spans.record(ended_call(self._call, self._generation, scope, self._began, status))
        return status

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> int:
        watching = watch(receive, self._mailbox)
        try:
            if self._call.ask.streaming:
                return await self._stream(send, chunk_writer(scope))
            return await self._whole(send)
        finally:
            watching.cancel()
            self._mailbox.close()
            self._metrics.count_tokens(self._call.num_prompt_tokens, self._generation.num_tokens)
            for perf, num_tokens in self._generation.timings():
                self._metrics.observe_engine(perf, num_tokens)

    async def _whole(self, send: Send) -> int:
        answer, generation = self._rendering.whole(self._call, self._generation), self._generation
        while not generation.is_done:
            answer.add(generation.add(await self._mailbox.take()))
        body = _encode(answer.fields())
        headers = [*JSON_HEADERS, *self._call.headers(), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return 200

    async def _stream(self, send: Send, write: Callable[[bytes], None]) -> int:
        generation = self._generation
        news = generation.add(await self._mailbox.take())
        self._metrics.observe_first_token(time.monotonic() - self._began)
        answer = self._rendering.stream(self._call, generation)
        headers = [(b"content-type", self._rendering.content_type), *STREAM_HEADERS, *self._call.headers()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        status, body = 200, answer.open() + answer.add(news)
        if not generation.is_done:
            write(body)
            status, body = await self._write_rest(answer, write)
        await send({"type": "http.response.body", "body": body})
        return status

    async def _write_rest(self, answer: Streamed, write: Callable[[bytes], None]) -> tuple[int, bytes]:
        """Write what comes as it comes. Returns the status to count and the last bytes. Raises ClientGone."""
        generation, ended = self._generation, asyncio.get_running_loop().create_future()

        def hear(responses: list[Response]) -> bytes:
            if ended.done():
                return b""
            try:
                chunk = answer.add(generation.add(responses))
            except Exception as error:
                return fail(error)
            if not generation.is_done:
                return chunk
            ended.set_result((200, chunk))
            return b""

        def fail(error: Exception) -> bytes:
            if not ended.done():
                failure = error if isinstance(error, APIError) else unexpected(error)
                ended.set_result((failure.status, answer.fail(failure)))
            return b""

        def gone() -> None:
            if not ended.done():
                ended.set_exception(ClientGone())

        text_stream = answer.text_stream(hear, fail)
        self._mailbox.listen(hear if text_stream is None else text_stream.hear, write, gone)
        try:
            result: tuple[int, bytes] = await ended
        except asyncio.CancelledError:  # this process ends, and the time to drain is over
            return 503, answer.fail(overloaded(503, SHUT_DOWN))
        return result


def watch(receive: Receive, mailbox: Mailbox) -> asyncio.Task[None]:
    """Abandon the mailbox when the client closes its connection. To be cancelled once it has its answer."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        mailbox.abandon()

    return asyncio.create_task(wait())
