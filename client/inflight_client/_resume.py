"""Replies that go on when the server ends: the request is sent again with what has come of it, its resume token.

    open ──> replies ──> final reply: done
      ^         │ the connection breaks, or the server says that it is ending
      └── wait until the model is ready, `resume_timeout` seconds at most

Each response of the server brings text and tokens together with the part of the resume token that stands for them. So
what the caller has is what the token says, nothing comes twice and nothing is lost, and a try that brings no reply
changes nothing. A beam search has no token: it begins anew, and what it repeats is left out. Both kinds of streams
share :class:`_Progress`, which knows no transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator

from inflight_client._exceptions import (
    Cancelled,
    ClientError,
    ConnectError,
    ConnectionLost,
    DeadlineExceeded,
    RequestRefused,
    Unavailable,
)
from inflight_client._protocol import chunk_from_reply, has_beams, num_sequences, resumable, resume_token_of
from inflight_client._transport import AsyncReplyStream, AsyncTransport, Call, Reply, ReplyStream, Transport
from inflight_client._types import Chunk

DEFAULT_RESUME_TIMEOUT = 300.0
"""Seconds: a large model takes minutes to load."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 1.0
"""Seconds between two looks whether the model is ready; they grow in between."""
READY_TIMEOUT = 2.0
"""Seconds that such a look takes at most."""
MAX_VAIN_RESUMES = 3
"""In a row without a reply, until their connection was lost: a request must not go on ending servers."""
JUDGED = ("journal_max_deaths", "journal_max_replays")
"""In the server's message: it has tried the request itself, and gives it up."""
ENDED_EARLY = "the server ended the stream before the answer was complete"


class _Progress:
    """What has come of a call, and whether it may be sent again."""

    def __init__(self, call: Call, resume_timeout: float) -> None:
        self.num_resumes = 0
        """So many calls after the first have brought replies."""
        self._call = call
        self._resume_timeout = resume_timeout
        self._deadline = None if call.timeout is None else time.monotonic() + call.timeout
        self._token: list[bytes] = []
        self._has_beams = has_beams(call)
        self._num_tokens: dict[int, int] = {}
        """Of each beam, so that a search that begins anew repeats none."""
        self._unfinished = set(range(num_sequences(call)))
        self._has_final = False
        self._is_waiting = False
        """Nothing has come since the last loss."""
        self._num_vain = 0
        self._lost_at = 0.0
        self._pause = FIRST_PAUSE

    @property
    def call(self) -> Call:
        """The one to be sent now. Raises DeadlineExceeded."""
        return resumable(self._call, self._token, self._seconds_left())

    @property
    def model(self) -> str:
        return self._call.model

    def take(self, reply: Reply) -> bool:
        """Note a reply. False if the caller has had it."""
        self.num_resumes += self._is_waiting
        self._is_waiting, self._num_vain = False, 0
        self._has_final = reply.final
        self._token += resume_token_of(reply)
        chunk = chunk_from_reply(reply)
        return chunk is None or self._is_new(chunk) or reply.final

    def _is_new(self, chunk: Chunk) -> bool:
        index, before = chunk.sequence_index, self._num_tokens.get(chunk.sequence_index, 0)
        was_finished = index not in self._unfinished
        if chunk.finish_reason is not None:
            self._unfinished.discard(index)
        elif self._has_beams:
            self._num_tokens[index] = max(before, chunk.num_output_tokens)
            return chunk.num_output_tokens > before
        return not (self._has_beams and was_finished)

    def rest(self, error: ClientError) -> list[Reply]:
        """What the caller lacks of a whole answer when replies end with this error; [] if they are to go on. Raises the
        error if the call cannot be sent again."""
        if self._has_final or not self._unfinished:
            return [Reply(final=True)]
        if not self._may_resume(error):
            raise error
        if not self._is_waiting:
            self._lost_at, self._pause = time.monotonic(), FIRST_PAUSE
        self._is_waiting = True
        self._num_vain += isinstance(error, ConnectionLost)
        if self._num_vain > MAX_VAIN_RESUMES:
            raise error
        return []

    def _may_resume(self, error: ClientError) -> bool:
        if _is_refusal(error) or isinstance(error, ConnectError):
            return self._is_waiting
        return isinstance(error, ConnectionLost) or (isinstance(error, Unavailable) and not _is_judged(error))

    def pause(self) -> float:
        """Seconds to wait before the next look. Raises ConnectionLost when the server was away for too long, and
        DeadlineExceeded."""
        if time.monotonic() - self._lost_at >= self._resume_timeout:
            message = f"the server ended, and was not back within {self._resume_timeout:g} s"
            raise ConnectionLost(message, request_id=self._call.request_id)
        pause, self._pause = self._pause, min(self._pause * 1.5, LONGEST_PAUSE)
        # Many clients lose a server at once.
        pause *= random.uniform(0.5, 1.0)
        left = self._seconds_left()
        return pause if left is None else min(pause, left)

    @property
    def cancelled(self) -> Cancelled:
        return Cancelled("the stream was closed", code="CANCELLED", request_id=self._call.request_id)

    @property
    def ended_early(self) -> ConnectionLost:
        return ConnectionLost(ENDED_EARLY, request_id=self._call.request_id)

    def _seconds_left(self) -> float | None:
        left = None if self._deadline is None else self._deadline - time.monotonic()
        if left is not None and left <= 0:
            message = "the answer was not complete before its deadline"
            raise DeadlineExceeded(message, code="DEADLINE_EXCEEDED", request_id=self._call.request_id)
        return left


class ResumingReplyStream:
    """A ReplyStream over as many calls as it takes."""

    def __init__(self, transport: Transport, call: Call, resume_timeout: float) -> None:
        """`resume_timeout`: seconds to wait for the server after each loss."""
        self._transport, self._progress = transport, _Progress(call, resume_timeout)
        self._replies: ReplyStream = transport.open(self._progress.call)
        self._cancelled = threading.Event()

    @property
    def num_resumes(self) -> int:
        return self._progress.num_resumes

    def __iter__(self) -> Iterator[Reply]:
        rest: list[Reply] = []
        while not rest:
            try:
                for reply in self._replies:
                    if self._progress.take(reply):
                        yield reply
                error: ClientError = self._progress.ended_early
            except ClientError as failure:
                error = failure
            if self._cancelled.is_set():
                raise error
            rest = self._progress.rest(error)
            if not rest:
                self._reopen()
        yield from rest

    def cancel(self) -> None:
        self._cancelled.set()
        self._replies.cancel()

    def _reopen(self) -> None:
        while True:
            if self._cancelled.wait(self._progress.pause()):
                raise self._progress.cancelled
            if self._transport.model_ready(self._progress.model, READY_TIMEOUT):
                break
        self._replies = self._transport.open(self._progress.call)
        if self._cancelled.is_set():
            self._replies.cancel()


class AsyncResumingReplyStream:
    """The same for asyncio."""

    def __init__(self, transport: AsyncTransport, call: Call, resume_timeout: float) -> None:
        self._transport, self._progress = transport, _Progress(call, resume_timeout)
        self._replies: AsyncReplyStream = transport.open(self._progress.call)
        self._cancelled = asyncio.Event()

    @property
    def num_resumes(self) -> int:
        return self._progress.num_resumes

    async def __aiter__(self) -> AsyncIterator[Reply]:
        rest: list[Reply] = []
        while not rest:
            try:
                async for reply in self._replies:
                    if self._progress.take(reply):
                        yield reply
                error: ClientError = self._progress.ended_early
            except ClientError as failure:
                error = failure
            if self._cancelled.is_set():
                raise error
            rest = self._progress.rest(error)
            if not rest:
                await self._reopen()
        for reply in rest:
            yield reply

    def cancel(self) -> None:
        self._cancelled.set()
        self._replies.cancel()

    async def _reopen(self) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._cancelled.wait(), self._progress.pause())
            if self._cancelled.is_set():
                raise self._progress.cancelled
            if await self._transport.model_ready(self._progress.model, READY_TIMEOUT):
                break
        self._replies = self._transport.open(self._progress.call)
        if self._cancelled.is_set():
            self._replies.cancel()


def _is_refusal(error: ClientError) -> bool:
    """Of a server that serves: its queue is full, or it does not know yet that the connection of the same request has
    ended."""
    return isinstance(error, RequestRefused) or error.code == "ALREADY_EXISTS"


def _is_judged(error: ClientError) -> bool:
    return any(sign in error.message for sign in JUDGED)
