"""The future of a request for users of the library. It can also be iterated to receive partial outputs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence

from inflight.context_phase import ContextPhaseParams
from inflight.errors import EngineUnavailable, InflightError, RequestError
from inflight.executor.front.request_output import CompletionOutput, RequestOutput
from inflight.executor.front.sequence_output import Seen, SequenceOutput
from inflight.executor.postprocess.messages import Piece
from inflight.request import Request
from inflight.result import Array, PerfMetrics, Response, Result, join_tensors


class GenerationResult:
    """The answer to one request.

    `result`, `aresult` and `await` wait for its end. Iterating over it, in a thread or in an event loop, yields the
    whole output so far each time that it has grown, if the request streams, and the finished output last. Any number of
    readers may wait and iterate; `text_diff` and `token_ids_diff` are what is new to the one who reads. Whoever waits
    gets the request's InflightError if it fails.

    Tokens are copied, and made into text, when a reader looks, not for each response that arrives.
    """

    def __init__(
        self,
        request: Request,
        abort: Callable[[int], None],
        *,
        abort_sequence: Callable[[int, int], None] | None = None,
        prompt: str | None = None,
        streaming: bool | None = None,
        sequences: Sequence[SequenceOutput] = (),
        arrival_time: float | None = None,
    ) -> None:
        """`abort(request_id)` asks the engine for an early end, `abort_sequence(request_id, index)` for that of one
        sequence. `prompt`: the text, if that was given. `streaming`:
        whether partial outputs are yielded, if not as `request` says. `sequences`: where the outputs grow; without
        them there is no text. `arrival_time`: repeated in the outputs."""
        self.request = request
        self.prompt = prompt
        self.streaming = request.streaming if streaming is None else streaming
        self._arrival_time = arrival_time
        self._abort, self._abort_sequence = abort, abort_sequence
        self._sequences = sequences or [SequenceOutput(index) for index in range(request.num_return_sequences)]
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._with_tensors: list[Result] = []
        self._num_changes = 0
        self._done = False
        self._error: InflightError | None = None
        self._perf_metrics: PerfMetrics | None = None
        self._context_phase_params: ContextPhaseParams | None = None

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def done(self) -> bool:
        """Whether it has ended, well or with an error."""
        return self._done

    @property
    def outputs(self) -> list[CompletionOutput]:
        """All continuations so far, without waiting. Does not raise the request's error."""
        with self._changed:
            return self._look([Seen()] * len(self._sequences)).outputs

    def tensors(self, sequence_index: int = 0) -> dict[str, Array]:
        """By name, the tensors that OutputConfig asked for of one sequence, as far as they have come; see
        Result.tensors. They are joined at each call."""
        with self._changed:
            found = [result for result in self._with_tensors if result.sequence_index == sequence_index]
        return join_tensors(found)

    def abort(self) -> None:
        """Ask for an early end; the result then holds the tokens generated until then."""
        self._abort(self.request.request_id)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the finished output. Raises TimeoutError after `timeout` seconds, or the request's InflightError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimeoutError(f"request {self.request.request_id} is not done after {timeout} s")
            return self._finished([Seen()] * len(self._sequences))

    async def aresult(self) -> RequestOutput:
        """The same for use in an event loop, without a timeout: use asyncio.wait_for."""
        async with contextlib.aclosing(self._outputs(partial=False)) as outputs:
            return await anext(outputs)

    def __await__(self) -> Generator[None, None, RequestOutput]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[RequestOutput]:
        num_seen, seen, done = 0, [Seen()] * len(self._sequences), False
        while not done:
            with self._changed:
                self._changed.wait_for(lambda last=num_seen: self._has_news(last, self.streaming))  # type: ignore[misc]
                num_seen, done = self._num_changes, self._done
                output = self._finished(seen) if done else self._look(seen)
            yield output

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._outputs(partial=self.streaming)

    async def _outputs(self, *, partial: bool) -> AsyncGenerator[RequestOutput, None]:
        """The finished output, after partial ones if wanted."""
        loop, news, num_seen, done = asyncio.get_running_loop(), asyncio.Event(), 0, False
        seen = [Seen()] * len(self._sequences)

        def tell() -> None:
            # An abandoned iterator stays registered until it is garbage-collected, when its event loop may be closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(news.set)

        with self._changed:
            self._listeners.append(tell)
        try:
            while not done:
                with self._changed:
                    news.clear()
                    output = None
                    if self._has_news(num_seen, partial):
                        num_seen, done = self._num_changes, self._done
                        output = self._finished(seen) if done else self._look(seen)
                if output is None:
                    await news.wait()
                else:
                    yield output
        finally:
            with self._changed:
                self._listeners.remove(tell)

    # -- the dispatcher's side -----------------------------------------------------------------------------------------

    def add(self, response: Response, piece: Piece | None = None) -> None:
        """Add a response of the engine and wake all readers. Once it is done, responses are ignored. `piece`: the text
        of its tokens, if a postprocessing worker has made it. Raises ValueError if that could not."""
        if piece is not None and piece.error:
            raise ValueError(piece.error)
        stopped: int | None = None
        with self._changed:
            if self._done:
                return
            if response.result is None:
                self._error = _error_of(response)
            else:
                stopped = self._add(response.result, piece)
            self._done = response.is_final or all(sequence.is_finished for sequence in self._sequences)
            self._tell()
        if self._done and not response.is_final:
            # Stop strings have ended all sequences, of which the ranks know nothing.
            self.abort()
        elif stopped is not None and not self._done and self._abort_sequence is not None:
            self._abort_sequence(self.request.request_id, stopped)

    def _add(self, result: Result, piece: Piece | None) -> int | None:
        """The index of the sequence, if a stop string ends it with this result."""
        sequence = self._sequences[result.sequence_index]
        was_finished = sequence.is_finished
        sequence.add(result, piece)
        if result.tensors and not was_finished:
            self._with_tensors.append(result)
        self._perf_metrics = result.request_perf_metrics
        self._context_phase_params = result.context_phase_params
        is_stopped = sequence.is_finished and not (was_finished or result.is_sequence_final)
        return result.sequence_index if is_stopped else None

    def fail(self, error: InflightError) -> None:
        """End it with an error that does not come from the engine."""
        with self._changed:
            if not self._done:
                self._error, self._done = error, True
                self._tell()

    def _tell(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()
        for tell in self._listeners:
            tell()

    # -- looking, with the lock held -----------------------------------------------------------------------------------

    def _has_news(self, num_seen: int, partial: bool) -> bool:
        return self._done or (partial and self._num_changes > num_seen)

    def _finished(self, seen: list[Seen]) -> RequestOutput:
        if self._error is not None:
            raise self._error
        return self._look(seen)

    def _look(self, seen: list[Seen]) -> RequestOutput:
        """A copy of what has come; `seen` is brought up to date."""
        outputs = []
        for index, sequence in enumerate(self._sequences):
            output, seen[index] = sequence.look(seen[index])
            outputs.append(output)
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.input_token_ids,
            outputs=outputs,
            finished=self._done,
            request_perf_metrics=self._perf_metrics,
            context_phase_params=self._context_phase_params,
            arrival_time=self._arrival_time,
        )


def _error_of(response: Response) -> InflightError:
    """The exception from which the response was made, found by its error code and outcome."""
    kinds: list[type[InflightError]] = [*RequestError.__subclasses__(), EngineUnavailable]
    wanted = (response.error_code, response.outcome)
    return next((kind for kind in kinds if (kind.code, kind.outcome) == wanted), RequestError)(response.error_msg)
