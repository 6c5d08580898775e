"""State that every front keeps: requests in flight, responses not fetched yet, and the state of the engine.

    STARTING ──> READY ──> RELAUNCHING ──> DOWN         any ──> CLOSED
                   ^            │           │
                   └────────────┴───────────┘

Each accepted request gets exactly one final response, whatever happens to the ranks. Requests in flight when the ranks
are lost fail; requests that arrive during a relaunch wait for the new ranks. Does not know processes or sockets: a
subclass sends requests to the leader and reports when the engine becomes ready and when it is lost.
"""

from __future__ import annotations

import enum
import secrets
import threading
from abc import abstractmethod
from collections.abc import Iterable

from inflight.errors import DuplicateRequest, EngineUnavailable, QueueFull, RequestCancelled
from inflight.executor.executor import Executor
from inflight.executor.front.journal import JournalEntry
from inflight.executor.wire.messages import FRONT_ID_SHIFT, MAX_FRONT_ID
from inflight.generation_defaults import GenerationDefaults
from inflight.request import Request, RequestLimits
from inflight.result import Response

RANKS_LOST = "the engine's ranks died while the request was in flight"
NOT_AVAILABLE = "the engine is not available: its ranks are dead"
SHUT_DOWN = "the engine was shut down"


class EngineState(enum.Enum):
    STARTING = enum.auto()
    READY = enum.auto()
    RELAUNCHING = enum.auto()
    """The ranks are lost and are being relaunched: requests are accepted and wait."""
    DOWN = enum.auto()
    """A relaunch has failed: requests are refused until a later one succeeds."""
    CLOSED = enum.auto()
    """This front was shut down. Final."""


ACCEPTING = (EngineState.READY, EngineState.RELAUNCHING)


class Front(Executor):
    """One lock protects all state. Nothing that may block is called while it is held."""

    def __init__(self, generation_defaults: GenerationDefaults | None = None) -> None:
        self._generation_defaults = generation_defaults or GenerationDefaults()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._state = EngineState.STARTING
        self._limits: RequestLimits | None = None
        self._device = ""
        self._max_in_flight = 0
        self._front_id = _draw_front_id()
        self._num_ids = 0
        self._journal: dict[int, JournalEntry] = {}
        self._responses: list[Response] = []
        self._stats: str | None = None
        self._num_queued = 0

    # -- Executor ------------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> RequestLimits:
        if self._limits is None:
            raise EngineUnavailable(NOT_AVAILABLE)
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
                raise QueueFull()
            self._journal[request.request_id] = JournalEntry(request)
            self._send_request(request.request_id, encoded)
        self._wake()

    def cancel_request(self, request_id: int) -> None:
        with self._changed:
            if request_id not in self._journal:
                return
            if self._state is EngineState.READY:
                self._send_cancel(request_id)
            else:
                # The request waits for a relaunch: no rank has received it.
                del self._journal[request_id]
                text = f"request Id {request_id} has been stopped. Request is ignored."
                self._responses.append(Response.of_error(request_id, RequestCancelled(text)))
                self._changed.notify_all()
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

    def is_relaunching(self) -> bool:
        return self._state is EngineState.RELAUNCHING

    def is_down(self) -> bool:
        return self._state is EngineState.DOWN

    # -- for subclasses: sending to the leader -------------------------------------------------------------------------

    @abstractmethod
    def _encode(self, request: Request) -> object:
        """The request in the form that _send_request takes. Raises RequestError. Called without the lock."""

    @abstractmethod
    def _send_request(self, request_id: int, encoded: object) -> None:
        """Queue it for sending, without waiting; the order of calls is kept. Called with the lock held."""

    @abstractmethod
    def _send_cancel(self, request_id: int) -> None:
        """The same for a cancellation. Called with the lock held."""

    @abstractmethod
    def _drop_unsent(self) -> None:
        """Discard what is queued and not sent yet. Called with the lock held."""

    @abstractmethod
    def _wake(self) -> None:
        """Something was queued for sending. Called without the lock."""

    # -- for subclasses: reports about the engine ----------------------------------------------------------------------

    def _engine_ready(self, limits: RequestLimits, device: str, max_in_flight: int) -> None:
        with self._changed:
            self._limits, self._device, self._max_in_flight = limits, device, max_in_flight
            self._state = EngineState.READY
            self._changed.notify_all()

    def _engine_lost(self, state: EngineState, sentence: str) -> int:
        """Fail all requests in flight with the message `sentence` and return their number. Later requests wait if
        `state` is RELAUNCHING and are refused otherwise."""
        with self._changed:
            self._state = state
            self._drop_unsent()
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
                    entry.note(response.result)
                self._responses.append(response)
            self._changed.notify_all()

    def _redraw_id(self) -> int:
        """Draw another id for this front, used from now on."""
        with self._lock:
            self._front_id = _draw_front_id()
            return self._front_id

    def _report_stats(self, json: str, num_queued: int) -> None:
        with self._lock:
            self._stats, self._num_queued = json, num_queued

    def _check_available(self) -> None:
        if self._state not in ACCEPTING:
            raise EngineUnavailable(SHUT_DOWN if self._state is EngineState.CLOSED else NOT_AVAILABLE)


def _draw_front_id() -> int:
    return 1 + secrets.randbelow(MAX_FRONT_ID)
