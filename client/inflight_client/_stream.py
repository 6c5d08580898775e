"""Streams of chunks for callers: iterators that are also context managers and cancel an unfinished request on exit.

Both kinds share :class:`_Answer`, which holds what has arrived and checks that it is complete. A stream that the caller
leaves after its last chunk is read to its end and not cancelled: if a cancellation coincides with the final response,
tritonserver up to at least 2.51 either keeps the request for ever, so that the model is never unloaded, or crashes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from types import TracebackType

from inflight_client._exceptions import ClientError, ConnectionLost
from inflight_client._protocol import chunk_from_reply
from inflight_client._resume import AsyncResumingReplyStream, ResumingReplyStream
from inflight_client._transport import AsyncReplyStream, Reply, ReplyStream
from inflight_client._types import Chunk, Completion, CompletionBuilder


class _Answer:
    """The part of an answer that has arrived."""

    def __init__(self, request_id: str, num_sequences: int, has_beams: bool) -> None:
        self.request_id = request_id
        self.is_final = False
        self._num_sequences = num_sequences
        self._finished: set[int] = set()
        self._builder = CompletionBuilder(request_id, has_beams)

    def take(self, reply: Reply) -> Chunk | None:
        self.is_final = self.is_final or reply.final
        chunk = chunk_from_reply(reply)
        if chunk is not None:
            self._builder.add(chunk)
            if chunk.finish_reason is not None:
                self._finished.add(chunk.sequence_index)
        return chunk

    @property
    def is_ending(self) -> bool:
        """The last chunk of every sequence has arrived; at most an empty final reply follows, without delay."""
        return self.is_final or len(self._finished) == self._num_sequences

    def check_complete(self) -> None:
        """Raise ConnectionLost if the answer ended without a final reply."""
        if not self.is_final:
            message = "the server ended the stream before the answer was complete"
            raise ConnectionLost(message, request_id=self.request_id)

    @property
    def completion(self) -> Completion:
        return self._builder.build()


class CompletionStream(Iterator[Chunk]):
    """Chunks of one answer, in order; those of several sequences come interleaved.

    with client.stream("Once upon a time") as stream:    # leaving early cancels the request
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    stream.completion                                    # all that came, joined
    """

    def __init__(
        self, replies: ReplyStream, request_id: str, num_sequences: int = 1, *, has_beams: bool = False
    ) -> None:
        self._replies = replies
        self._iterator = iter(replies)
        self._answer = _Answer(request_id, num_sequences, has_beams)
        self._closed = False

    @property
    def request_id(self) -> str:
        return self._answer.request_id

    @property
    def num_resumes(self) -> int:
        """How often the answer has gone on after its server had ended, see `resume`."""
        return self._replies.num_resumes if isinstance(self._replies, ResumingReplyStream) else 0

    @property
    def completion(self) -> Completion:
        """What has come so far; the whole answer once the stream is exhausted."""
        return self._answer.completion

    def __next__(self) -> Chunk:
        if self._closed:
            raise StopIteration
        try:
            for reply in self._iterator:
                chunk = self._answer.take(reply)
                if chunk is not None:
                    return chunk
            self._answer.check_complete()
        except BaseException:
            self.close()
            raise
        self._closed = True
        raise StopIteration

    def close(self) -> None:
        """Cancel the request if it is unfinished. May be called at any time, repeatedly and from another thread."""
        if not self._closed:
            self._closed = True
            if self._answer.is_ending:
                self._read_to_the_end()
            else:
                self._replies.cancel()

    def _read_to_the_end(self) -> None:
        # ValueError: another thread is reading already.
        with contextlib.suppress(ClientError, ValueError):
            for _ in self._iterator:
                pass

    def __enter__(self) -> CompletionStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


class AsyncCompletionStream(AsyncIterator[Chunk]):
    """The same for asyncio.

    async with client.stream("Once upon a time") as stream:
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
    """

    def __init__(
        self, replies: AsyncReplyStream, request_id: str, num_sequences: int = 1, *, has_beams: bool = False
    ) -> None:
        self._replies = replies
        self._iterator = replies.__aiter__()
        self._answer = _Answer(request_id, num_sequences, has_beams)
        self._closed = False

    @property
    def request_id(self) -> str:
        return self._answer.request_id

    @property
    def num_resumes(self) -> int:
        """How often the answer has gone on after its server had ended, see `resume`."""
        return self._replies.num_resumes if isinstance(self._replies, AsyncResumingReplyStream) else 0

    @property
    def completion(self) -> Completion:
        """What has come so far; the whole answer once the stream is exhausted."""
        return self._answer.completion

    async def __anext__(self) -> Chunk:
        if self._closed:
            raise StopAsyncIteration
        try:
            async for reply in self._iterator:
                chunk = self._answer.take(reply)
                if chunk is not None:
                    return chunk
            self._answer.check_complete()
        except BaseException:
            await self.close()
            raise
        self._closed = True
        raise StopAsyncIteration

    async def close(self) -> None:
        """Cancel the request if it is unfinished. May be called at any time and repeatedly."""
        if not self._closed:
            self._closed = True
            if self._answer.is_ending:
                await self._read_to_the_end()
            else:
                self._replies.cancel()

    async def _read_to_the_end(self) -> None:
        # RuntimeError: another task is reading already.
        with contextlib.suppress(ClientError, RuntimeError):
            async for _ in self._iterator:
                pass

    async def __aenter__(self) -> AsyncCompletionStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._replies.cancel()
