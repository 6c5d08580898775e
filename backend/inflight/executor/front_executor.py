"""What all executors have in common: the journal of requests in flight, and the responses that wait to be fetched.

Knows nothing of processes or sockets. A subclass carries requests to the leader and says when the engine comes and
goes; this class sees to it that each accepted request gets exactly one final response, whatever happens to the ranks.
"""

from __future__ import annotations

import enum
import threading
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from inflight.errors import DuplicateRequest, EngineUnavailable, QueueFull
from inflight.executor.executor import Executor
from inflight.executor.request_book import QUEUE_FULL
from inflight.generation_defaults import GenerationDefaults
from inflight.request import Request, RequestLimits
from inflight.result import Response

FRONT_ID_SHIFT = 48
"""Request ids of one front: its id in the upper 16 bits, a counter below."""

LOST = "the engine's ranks died while the request was in flight"
DOWN = "the engine is not available: its ranks are being restarted"
CLOSED = "the engine was shut down"


class EngineState(enum.Enum):
    STARTING = enum.auto()
    READY = enum.auto()
    DOWN = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True)
class JournalEntry:
    """A request in flight and what of its answer has come: enough to go on from there elsewhere."""

    request: Request
    output_token_ids: list[int] = field(default_factory=list)


class FrontExecutor(Executor):
    """The front half. All state is behind one lock; nothing slow happens while it is held."""

    def __init__(self, generation_defaults: GenerationDefaults | None = None) -> None:
        self._generation_defaults = generation_defaults or GenerationDefaults()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._state = EngineState.STARTING
        self._limits: RequestLimits | None = None
        self._device = ""
        self._max_in_flight = 0
        self._front_id = 0
        self._num_ids = 0
        self._journal: dict[int, JournalEntry] = {}
        self._responses: list[Response] = []
        self._stats: str | None = None
        self._num_queued = 0

    # -- Executor ------------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> RequestLimits:
        if self._limits is None:
            raise EngineUnavailable(DOWN)
        return self._limits

    @property
    def device(self) -> str:
        return self._device

    @property
    def generation_defaults(self) -> GenerationDefaults:
        return self._generation_defaults

    def next_request_id(self) -> int:
        with self._lock:
            self._num_ids += 1
            return self._front_id << FRONT_ID_SHIFT | self._num_ids

    def enqueue_request(self, request: Request) -> None:
        self._check_available()
        self.limits.validate(request)
        encoded = self._encode(request)
        with self._lock:
            self._check_available()
            if request.request_id in self._journal:
                raise DuplicateRequest(f"requestId {request.request_id} is already in progress, request is ignored.")
            if self._max_in_flight and len(self._journal) >= self._max_in_flight:
                raise QueueFull(QUEUE_FULL)
            self._journal[request.request_id] = JournalEntry(request)
            self._send_request(encoded)
        self._wake()

    def cancel_request(self, request_id: int) -> None:
        with self._lock:
            if request_id not in self._journal or self._state is not EngineState.READY:
                return
            self._send_cancel(request_id)
        self._wake()

    def await_responses(self, timeout: float | None = None) -> list[Response]:
        with self._changed:
            self._changed.wait_for(lambda: self._responses or self._state is EngineState.CLOSED, timeout)
            responses, self._responses = self._responses, []
            return responses

    def get_latest_iteration_stats(self) -> str | None:
        with self._lock:
            stats, self._stats = self._stats, None
            return stats

    def num_requests_in_flight(self) -> int:
        return len(self._journal)

    def num_requests_queued(self) -> int:
        return self._num_queued

    def is_ready(self) -> bool:
        return self._state is EngineState.READY

    # -- for subclasses: the way to the leader -------------------------------------------------------------------------

    @abstractmethod
    def _encode(self, request: Request) -> object:
        """The request as _send_request wants it. Raises RequestError. Called without the lock."""

    @abstractmethod
    def _send_request(self, encoded: object) -> None:
        """Put it on its way, in the order of the calls, without waiting. Called with the lock held."""

    @abstractmethod
    def _send_cancel(self, request_id: int) -> None:
        """Likewise for a cancel."""

    @abstractmethod
    def _wake(self) -> None:
        """There is something to carry. Called without the lock."""

    # -- for subclasses: news of the engine ----------------------------------------------------------------------------

    def _engine_ready(self, limits: RequestLimits, device: str, front_id: int, max_in_flight: int) -> None:
        with self._changed:
            self._limits, self._device = limits, device
            self._front_id, self._max_in_flight = front_id, max_in_flight
            self._state = EngineState.READY
            self._changed.notify_all()

    def _engine_gone(self, state: EngineState, sentence: str) -> int:
        """Fail everything in flight and refuse what comes; returns how many requests that was."""
        with self._changed:
            self._state = state
            lost, self._journal = self._journal, {}
            self._responses += [Response.of_error(request_id, EngineUnavailable(sentence)) for request_id in lost]
            self._stats, self._num_queued = None, 0
            self._changed.notify_all()
            return len(lost)

    def _deliver(self, responses: Iterable[Response]) -> None:
        with self._changed:
            for response in responses:
                entry = self._journal.get(response.request_id)
                if entry is None:
                    continue
                if response.is_final:
                    del self._journal[response.request_id]
                elif response.result is not None:
                    entry.output_token_ids += response.result.output_token_ids
                self._responses.append(response)
            self._changed.notify_all()

    def _report_stats(self, json: str, num_queued: int) -> None:
        with self._lock:
            self._stats, self._num_queued = json, num_queued

    def _check_available(self) -> None:
        if self._state is not EngineState.READY:
            raise EngineUnavailable(CLOSED if self._state is EngineState.CLOSED else DOWN)
