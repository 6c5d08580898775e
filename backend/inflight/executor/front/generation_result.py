"""The future of a request for users of the library. It can also be iterated to receive partial results."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from inflight.errors import EngineUnavailable, InflightError, RequestError
from inflight.request import Request
from inflight.result import Array, FinishReason, Response, Result, join_tensors


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation of the prompt, as far as it is generated."""

    index: int
    token_ids: list[int]
    """All generated tokens so far; never the prompt."""
    log_probs: list[float]
    """Log probability of each token, if the request asked for them."""
    cum_log_prob: float
    finish_reason: FinishReason


class GenerationResult:
    """The answer to one request. Iterating over it, in a thread or in an event loop, yields the whole output so far
    each time that it has grown; a request that does not stream yields one output. Any number of readers may wait.

    Tokens are copied for a reader when it looks, not for each response that arrives.
    """

    def __init__(self, request: Request, cancel: Callable[[int], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._token_ids: list[int] = []
        self._log_probs: list[float] = []
        self._with_tensors: list[Result] = []
        self._latest = Result()
        self._num_changes = 0
        self._done = False
        self._error: InflightError | None = None

    @property
    def done(self) -> bool:
        return self._done

    def tensors(self) -> dict[str, Array]:
        """By name, what OutputConfig asked for, as far as it has come; see Result.tensors. Joined at each call."""
        with self._changed:
            found = list(self._with_tensors)
        return join_tensors(found)

    def cancel(self) -> None:
        """Ask for an early end; the result then holds the tokens generated until then."""
        self._cancel(self.request.request_id)

    def result(self, timeout: float | None = None) -> CompletionOutput:
        """Wait for the final output. Raises TimeoutError after `timeout` seconds, or the request's InflightError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimeoutError(f"request {self.request.request_id} is not done after {timeout} s")
        return self._finished()

    async def aresult(self) -> CompletionOutput:
        """The same for use in an event loop, without a timeout."""
        async for _ in self:
            pass
        return self._finished()

    def __iter__(self) -> Iterator[CompletionOutput]:
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda last=seen: self._num_changes > last)  # type: ignore[misc]
                seen, output, done = self._num_changes, self._output(), self._done
            if done:
                yield self._finished()
                return
            yield output

    async def __aiter__(self) -> AsyncIterator[CompletionOutput]:
        loop, news, seen = asyncio.get_running_loop(), asyncio.Event(), 0

        def tell() -> None:
            # An abandoned iterator stays registered until it is garbage-collected, when its event loop may be closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(news.set)

        with self._changed:
            self._listeners.append(tell)
        try:
            while True:
                with self._changed:
                    news.clear()
                    output = self._output() if self._num_changes > seen else None
                    seen, done = self._num_changes, self._done
                if output is None:
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
        """Add a response of the engine and wake all readers."""
        with self._changed:
            if response.result is None:
                self._error = _error_of(response)
            else:
                self._token_ids += response.result.output_token_ids
                self._log_probs += response.result.log_probs
                if response.result.tensors:
                    self._with_tensors.append(response.result)
                self._latest = response.result
            self._done = response.is_final
            self._num_changes += 1
            self._changed.notify_all()
            for tell in self._listeners:
                tell()

    def _finished(self) -> CompletionOutput:
        if self._error is not None:
            raise self._error
        with self._changed:
            return self._output()

    def _output(self) -> CompletionOutput:
        """A copy of what has come. Called with the lock held."""
        return CompletionOutput(
            index=self._latest.sequence_index,
            token_ids=list(self._token_ids),
            log_probs=list(self._log_probs),
            cum_log_prob=self._latest.cum_log_prob,
            finish_reason=self._latest.finish_reason,
        )


def _error_of(response: Response) -> InflightError:
    """The exception from which the response was made, found by its error code and outcome."""
    kinds: list[type[InflightError]] = [*RequestError.__subclasses__(), EngineUnavailable]
    wanted = (response.error_code, response.outcome)
    return next((kind for kind in kinds if (kind.code, kind.outcome) == wanted), RequestError)(response.error)
