"""The leader's book of all fronts' requests in flight and of the responses to be sent. Knows no socket, rank or model.

A request is waiting (in the queue, or before that for its grammar), active (handed to the ranks) or forgotten. Of all
ranks only the leader reads the clock, here: a deadline that passes becomes a stop signal, which all ranks receive in
the same iteration.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable

from msgspec import structs

from inflight.errors import (
    DuplicateRequest,
    InflightError,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
)
from inflight.executor.rank.leader.request_queue import RequestQueue
from inflight.guided_decoding import GuidedDecodingParams
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, Response
from inflight.runtime.guided.grammar import GrammarState
from inflight.runtime.guided.grammars import Grammars
from inflight.stats import IterationStats

CLOCK_SECONDS = 0.1
"""Shortest time between two times that the ranks are told: no duration of KV cache retention needs to be met better."""

Front = bytes
"""The transport's identity of a front."""


class RequestBook:
    """To be used from one thread."""

    def __init__(
        self,
        max_in_flight: int = 0,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        limits: RequestLimits | None = None,
    ) -> None:
        """`max_in_flight`: waiting and active requests of all fronts together; 0 = no limit. `clock`: seconds.
        `grammars`: None = requests with a grammar are refused. `limits`: None = every front has validated its
        requests."""
        self._max_in_flight = max_in_flight
        self._limits = limits
        self._clock = clock
        self._queue = RequestQueue()
        self._grammars = grammars
        self._guided: dict[int, GuidedDecodingParams] = {}  # of every waiting or active request that leases a grammar
        self._compiling: dict[int, Request] = {}  # those of them whose grammars are not ready
        self._fronts: dict[int, Front] = {}  # request id -> front, of every waiting or active request
        self._stops: dict[int, FinishReason] = {}
        self._deadlines: dict[int, float] = {}  # of the requests in flight that have an allotted time
        self._deadline_heap: list[tuple[float, int]] = []  # the same, and stale entries
        self._outboxes: dict[Front, list[Response]] = {}
        self._queued_since: dict[int, float] = {}  # clock time of arrival, of every waiting request
        self._tells_time = False  # since the first request whose blocks are kept for a limited time
        self._next_time = 0.0
        self._queue_seconds = 0.0  # that the requests of the last `take` had waited, added up

    @property
    def has_input(self) -> bool:
        """Whether `take` would return requests or stop signals."""
        return bool(self._queue) or bool(self._stops)

    @property
    def num_in_flight(self) -> int:
        return len(self._fronts)

    @property
    def num_queued(self) -> int:
        """Requests in flight that are waiting."""
        return len(self._queue) + len(self._compiling)

    @property
    def awaits_grammars(self) -> bool:
        """Whether requests wait for grammars: `poll_grammars` is to be called often."""
        return bool(self._compiling)

    def submit(self, front: Front, request: Request) -> None:
        request_id = request.request_id
        if request_id in self._fronts:
            self._refuse(front, request_id, DuplicateRequest(f"requestId {request_id} is already in progress"))
        elif self._max_in_flight and len(self._fronts) >= self._max_in_flight:
            self._refuse(front, request_id, QueueFull())
        elif self._is_valid(front, request) and self._leases_grammar(front, request):
            self._fronts[request_id] = front
            self._queued_since[request_id] = self._clock()
            if request_id in self._guided:
                self._compiling[request_id] = request
            else:
                self._queue.push(request)
            retention = request.kv_cache_retention_config
            self._tells_time = self._tells_time or (retention is not None and retention.has_durations)
            if request.allotted_time_ms > 0:
                self._set_deadline(request_id, self._queued_since[request_id] + request.allotted_time_ms / 1000)

    def _is_valid(self, front: Front, request: Request) -> bool:
        """Whether the queue can take it; False if it had to be refused. A front may be any program of this user."""
        try:
            if self._limits is not None:
                self._limits.validate_queueing(request)
        except InvalidRequest as error:
            self._refuse(front, request.request_id, error)
            return False
        return True

    def _leases_grammar(self, front: Front, request: Request) -> bool:
        """Lease the request's grammar, if it has one, until it is forgotten; False if the request had to be refused."""
        params = request.guided_decoding_params
        if params is None:
            return True
        try:
            if self._grammars is None:
                raise InvalidRequest("guided decoding is not supported by this engine")
            params.validate()
        except InvalidRequest as error:
            self._refuse(front, request.request_id, error)
            return False
        self._grammars.lease(params)
        self._guided[request.request_id] = params
        return True

    def cancel(self, front: Front, request_ids: Iterable[int]) -> None:
        """Stop requests of `front`; those it does not have in flight are ignored."""
        for request_id in request_ids:
            if self._fronts.get(request_id) == front:
                text = f"request Id {request_id} has been stopped. Request is ignored."
                self._stop(request_id, FinishReason.CANCELLED, RequestCancelled(text))

    def leave(self, front: Front) -> None:
        """The front is gone: stop its requests and discard its responses."""
        self.cancel(front, [request_id for request_id, owner in self._fronts.items() if owner == front])
        self._outboxes.pop(front, None)

    def stop_everything(self) -> None:
        for front in set(self._fronts.values()):
            self.cancel(front, [request_id for request_id, owner in self._fronts.items() if owner == front])

    def take(self, max_sequences: int, *, is_idle: bool = False) -> tuple[list[Request], dict[int, FinishReason]]:
        """The ranks' input for this iteration: new requests, and stops of active requests.

        The new requests have at most `max_sequences` sequences together; a negative number means no limit. The head of
        the queue is never overtaken: if it has more sequences than there is room for, everybody waits behind it. An
        idle engine takes the head whatever its width, as there will never be more room.
        """
        self.poll_grammars()
        now = self._clock()
        self._expire(now)
        room = max_sequences if max_sequences >= 0 else math.inf
        requests: list[Request] = []
        while self._queue:
            width = self._queue.head().num_sequences
            if width > room and (requests or not is_idle):
                break
            room -= width
            requests.append(self._queue.pop())
        self._queue_seconds = sum(now - self._queued_since.pop(request.request_id) for request in requests)
        stops, self._stops = self._stops, {}
        return requests, stops

    def time_to_tell(self) -> int:
        """The time in ms that the ranks are to be told in this iteration; 0 = none. Nobody is told any before there was
        a request that needs it."""
        if not self._tells_time:
            return 0
        now = self._clock()
        if now < self._next_time:
            return 0
        self._next_time = now + CLOCK_SECONDS
        return max(int(now * 1000), 1)

    def poll_grammars(self) -> None:
        """Queue the requests whose grammars have become ready, in order of arrival, and refuse those of broken ones and
        those whose time is over."""
        if self._grammars is None or not self._compiling:
            return
        self._expire(self._clock())
        self._grammars.poll()
        for request_id, request in list(self._compiling.items()):
            grammar = self._grammars.find(self._guided[request_id])
            if grammar is None or grammar.state is GrammarState.COMPILING:
                continue
            del self._compiling[request_id]
            if grammar.state is GrammarState.READY:
                self._queue.push(request)
            else:
                front, reason = self._fronts[request_id], grammar.reason
                self._forget(request_id)
                self._refuse(front, request_id, InvalidRequest(reason))

    def respond(self, response: Response) -> None:
        """Keep a response of the ranks for the front that sent the request."""
        request_id = response.request_id
        front = self._fronts.get(request_id)
        if front is None:
            return
        self._outboxes.setdefault(front, []).append(response)
        if response.is_final:
            self._forget(request_id)

    def complete(self, stats: IterationStats) -> IterationStats:
        """`stats` with what only the leader knows of the iteration: who waits here, and how long the new ones did."""
        return structs.replace(
            stats,
            num_queued_requests=len(self._queue),
            new_active_requests_queue_latency_ms=self._queue_seconds * 1000,
        )

    def collect_responses(self) -> dict[Front, list[Response]]:
        """All responses kept since the last call."""
        outboxes, self._outboxes = self._outboxes, {}
        return outboxes

    def _set_deadline(self, request_id: int, deadline: float) -> None:
        self._deadlines[request_id] = deadline
        heapq.heappush(self._deadline_heap, (deadline, request_id))
        if len(self._deadline_heap) > 64 + 2 * len(self._deadlines):
            self._deadline_heap = sorted((deadline, id_) for id_, deadline in self._deadlines.items())

    def _expire(self, now: float) -> None:
        while self._deadline_heap and self._deadline_heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadline_heap)
            if self._deadlines.get(request_id) == deadline:
                text = f"request Id {request_id} waited longer than the time it was allotted"
                self._stop(request_id, FinishReason.TIMED_OUT, RequestTimedOut(text))

    def _stop(self, request_id: int, reason: FinishReason, error_if_waiting: InflightError) -> None:
        if self._compiling.pop(request_id, None) is not None or self._queue.discard(request_id):
            front = self._fronts[request_id]
            self._forget(request_id)
            self._refuse(front, request_id, error_if_waiting)
        else:
            self._stops.setdefault(request_id, reason)

    def _forget(self, request_id: int) -> None:
        del self._fronts[request_id]
        self._deadlines.pop(request_id, None)
        self._queued_since.pop(request_id, None)
        self._stops.pop(request_id, None)
        params = self._guided.pop(request_id, None)
        if params is not None and self._grammars is not None:
            self._grammars.release(params)

    def _refuse(self, front: Front, request_id: int, error: InflightError) -> None:
        self._outboxes.setdefault(front, []).append(Response.of_error(request_id, error))
