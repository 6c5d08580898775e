"""An Executor without an engine: it returns the responses that the test pushes."""

from __future__ import annotations

import threading

from inflight.errors import EngineUnavailable
from inflight.executor.executor import Executor
from inflight.generation_defaults import GenerationDefaults
from inflight.request import Request, RequestLimits
from inflight.result import FinishReason, Response, Result
from inflight.stats import IterationStats

STATS = IterationStats(
    timestamp="11-21-2026 08:26:40.250000",
    iteration_counter=7,
    active_request_count=3,
    max_request_count=64,
    runtime_cpu_memory=1000,
    runtime_gpu_memory=0,
    runtime_pinned_memory=0,
    max_kv_cache_blocks=100,
    free_kv_cache_blocks=90,
    used_kv_cache_blocks=10,
    tokens_per_kv_cache_block=16,
    reused_kv_cache_blocks=2,
    fraction_used_kv_cache_blocks=0.1,
    scheduled_requests=2,
    context_requests=1,
    generation_requests=1,
    total_context_tokens=20,
    micro_batch_id=0,
    paused_requests=0,
    waiting_requests=1,
)


class FakeExecutor(Executor):
    def __init__(self, vocab_size: int = 300, max_seq_len: int = 64) -> None:
        self._limits = RequestLimits(
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            max_input_len=max_seq_len - 1,
            kv_cache_tokens=10 * max_seq_len,
        )
        self._changed = threading.Condition()
        self._waiting: list[Response] = []
        self._next_id = 100
        self.enqueued: dict[int, Request] = {}
        self.cancelled: list[int] = []
        self.stats: str | None = None
        self.ready = True
        self.relaunching = False
        self.refusal: Exception | None = None
        self.is_shut_down = False

    @property
    def limits(self) -> RequestLimits:
        return self._limits

    @property
    def generation_defaults(self) -> GenerationDefaults:
        return GenerationDefaults()

    @property
    def device(self) -> str:
        return "cuda"  # a device without a rate limit for responses

    def start(self) -> None:
        self.ready = True

    def next_request_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def enqueue_request(self, request: Request) -> None:
        if self.refusal is not None:
            raise self.refusal
        self._limits.validate(request)
        if self.is_shut_down:
            raise EngineUnavailable("the engine was shut down")
        self.enqueued[request.request_id] = request

    def await_responses(self, timeout: float | None = None) -> list[Response]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_shut_down, timeout)
            responses, self._waiting = self._waiting, []
            return responses

    def cancel_request(self, request_id: int) -> None:
        if request_id in self.enqueued:
            self.cancelled.append(request_id)

    def get_latest_iteration_stats(self) -> str | None:
        stats, self.stats = self.stats, None
        return stats

    def num_requests_in_flight(self) -> int:
        return len(self.enqueued)

    def num_requests_queued(self) -> int:
        return 0

    def is_ready(self) -> bool:
        return self.ready and not self.is_shut_down

    def is_relaunching(self) -> bool:
        return self.relaunching and not self.is_shut_down

    def is_down(self) -> bool:
        return not self.is_ready() and not self.is_relaunching()

    def shutdown(self) -> None:
        with self._changed:
            for request_id in list(self.enqueued):
                self._push(Response.of_error(request_id, EngineUnavailable("the engine was shut down")))
            self.is_shut_down = True
            self._changed.notify_all()

    @property
    def last(self) -> Request:
        """The request enqueued last."""
        return list(self.enqueued.values())[-1]

    def push(self, *responses: Response) -> None:
        """Make these responses available, all at once."""
        with self._changed:
            for response in responses:
                self._push(response)
            self._changed.notify_all()

    def _push(self, response: Response) -> None:
        self._waiting.append(response)
        if response.is_final:
            self.enqueued.pop(response.request_id, None)


def tokens(request_id: int, ids: list[int], finish: FinishReason = FinishReason.NOT_FINISHED) -> Response:
    """New tokens; final if `finish` says why."""
    final = finish is not FinishReason.NOT_FINISHED
    return Response(
        request_id=request_id,
        result=Result(output_token_ids=ids, finish_reason=finish, is_final=final, is_sequence_final=final),
    )
