"""An Executor without an engine: it returns the responses that the test pushes."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.batch_manager_stats import BatchManagerStats
from inflight.config import EngineConfig
from inflight.engine_description import EngineDescription
from inflight.executor.front.engine_state import EngineState
from inflight.executor.front.front import SHUT_DOWN, Front
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, Response, Result

STATS = BatchManagerStats(
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


class FakeExecutor(Front):
    """A front without an engine behind it."""

    def __init__(self, vocab_size: int = 300, max_seq_len: int = 64, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        self.enqueued: dict[int, Request] = {}
        """Requests in flight."""
        self.cancelled: list[int] = []
        self.cancelled_sequences: list[tuple[int, int]] = []
        self.stats: str | None = None
        self.ready = True
        self.relaunching = False
        self.refusal: Exception | None = None
        limits = RequestLimits(
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            max_input_len=max_seq_len - 1,
            kv_cache_tokens=10 * max_seq_len,
            max_batch_size=4,
            max_context_tokens=max_seq_len,
        )
        # Of a device without a rate limit for responses.
        self._replica_ready(limits, EngineDescription(device="cuda"), max_in_flight=0)

    @property
    def is_shut_down(self) -> bool:
        return self._state is EngineState.CLOSED

    def start(self) -> None:
        self.ready = True

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        if self.refusal is not None:
            raise self.refusal
        return super().enqueue_requests(requests)

    def get_latest_batch_manager_stats(self) -> str | None:
        stats, self.stats = self.stats, None
        return stats

    def is_ready(self) -> bool:
        return self.ready and not self.is_shut_down

    def ready_replicas(self) -> list[bool]:
        return [self.is_ready()]

    def is_relaunching(self) -> bool:
        return self.relaunching and not self.is_shut_down

    def is_down(self) -> bool:
        return not self.is_ready() and not self.is_relaunching()

    def shutdown(self) -> None:
        self._replica_lost(EngineState.CLOSED, SHUT_DOWN)
        self.enqueued.clear()

    @property
    def last(self) -> Request:
        """The request enqueued last."""
        return list(self.enqueued.values())[-1]

    def push(self, *responses: Response) -> None:
        """Make these responses available, all at once."""
        for response in responses:
            if response.is_final:
                self.enqueued.pop(response.request_id, None)
        self._deliver(responses)

    # -- Front ---------------------------------------------------------------------------------------------------------

    def _encode(self, request: Request) -> object:
        return request

    def _send_request(self, replica: int, request_id: int, encoded: object) -> None:
        assert isinstance(encoded, Request)
        self.enqueued[request_id] = encoded

    def _send_cancel(self, replica: int, request_id: int) -> None:
        self.cancelled.append(request_id)

    def _send_cancel_sequence(self, replica: int, request_id: int, sequence_index: int) -> None:
        self.cancelled_sequences.append((request_id, sequence_index))

    def _drop_unsent(self, replica: int) -> None:
        """Everything was sent."""


def tokens(request_id: int, ids: list[int], finish: FinishReason = FinishReason.NOT_FINISHED) -> Response:
    """New tokens; final if `finish` says why."""
    final = finish is not FinishReason.NOT_FINISHED
    return Response(
        request_id=request_id,
        result=Result(output_token_ids=ids, finish_reason=finish, is_final=final, is_sequence_final=final),
    )
