"""What a user of the library holds while a request is computed: a future that can also be watched growing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from inflight.errors import EngineUnavailable, InflightError, RequestError
from inflight.request import Request
from inflight.result import FinishReason, Response


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation of the prompt, as far as it has come."""

    index: int
    token_ids: list[int]
    """All of them; never the prompt."""
    log_probs: list[float]
    """Of each token, if the request asked for them."""
    cum_log_prob: float
    finish_reason: FinishReason


class GenerationResult:
    """The answer to one request. Iterating it, in a thread or in an event loop, gives what has come each time that more
    has; a request that does not stream gives one output. Any number of readers may wait on it."""

    def __init__(self, request: Request, cancel: Callable[[int], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._output = CompletionOutput(
            index=0, token_ids=[], log_probs=[], cum_log_prob=0.0, finish_reason=FinishReason.NOT_FINISHED
        )
        self._num_changes = 0
        self._done = False
        self._error: InflightError | None = None

    @property
    def done(self) -> bool:
        return self._done

    def cancel(self) -> None:
        """Ask for an early end; the result then has what was computed."""
        self._cancel(self.request.request_id)

    def result(self, timeout: float | None = None) -> CompletionOutput:
        """Wait for the end. Raises TimeoutError after `timeout` seconds, and InflightError if the request failed."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimeoutError(f"request {self.request.request_id} is not done after {timeout} s")
        return self._finished()

    async def aresult(self) -> CompletionOutput:
        """The same for an event loop."""
        async for _ in self:
            pass
        return self._finished()

    def __iter__(self) -> Iterator[CompletionOutput]:
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda last=seen: self._num_changes > last)  # type: ignore[misc]
                seen, output, done = self._num_changes, self._output, self._done
            if done:
                yield self._finished()
                return
            yield output

    async def __aiter__(self) -> AsyncIterator[CompletionOutput]:
        loop, news, seen = asyncio.get_running_loop(), asyncio.Event(), 0

        def tell() -> None:
            # An iterator that was left in the middle outlives its loop until it is collected.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(news.set)

        with self._changed:
            self._listeners.append(tell)
        try:
            while True:
                with self._changed:
                    news.clear()
                    changed, output, done = self._num_changes > seen, self._output, self._done
                    seen = self._num_changes
                if not changed:
                    await news.wait()
                    continue
                if done:
                    yield self._finished()
                    return
                yield output
        finally:
            with self._changed:
                self._listeners.remove(tell)

    def add(self, response: Response) -> None:
        """Take in a response of the engine."""
        with self._changed:
            if response.result is None:
                self._error = _error_of(response)
            else:
                result, before = response.result, self._output
                self._output = CompletionOutput(
                    index=result.sequence_index,
                    token_ids=before.token_ids + result.output_token_ids,
                    log_probs=before.log_probs + result.log_probs,
                    cum_log_prob=result.cum_log_prob,
                    finish_reason=result.finish_reason,
                )
            self._done = response.is_final
            self._num_changes += 1
            self._changed.notify_all()
            for tell in self._listeners:
                tell()

    def _finished(self) -> CompletionOutput:
        if self._error is not None:
            raise self._error
        return self._output


def _error_of(response: Response) -> InflightError:
    """The exception that was raised where the response was made."""
    kinds: list[type[InflightError]] = [*RequestError.__subclasses__(), EngineUnavailable]
    wanted = (response.error_code, response.outcome)
    return next((kind for kind in kinds if (kind.code, kind.outcome) == wanted), RequestError)(response.error)
