"""The leader's book of all fronts' requests in flight and of the responses to be sent. Knows no socket, rank or model.

A request is waiting (in the queue, or before that for its grammar or adapter), active (handed to the ranks) or
forgotten. One that ranks may have died of waits apart (see Suspects).

Of all ranks only the leader reads the clock, here: a deadline that passes becomes a stop signal, which all ranks
receive in the same iteration.
"""

from __future__ import annotations

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
from inflight.executor.rank.leader.contexts import Contexts
from inflight.executor.rank.leader.deadlines import Deadlines
from inflight.executor.rank.leader.leases import Leases
from inflight.executor.rank.leader.request_queue import RequestQueue
from inflight.executor.rank.leader.suspects import Suspects
from inflight.executor.wire.block_messages import BlockOrders
from inflight.lora import AdapterOrders
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, PerfMetrics, Response, Result
from inflight.runtime.adapters.adapter_library import AdapterLibrary
from inflight.runtime.guided.grammars import Grammars
from inflight.stats import IterationStats

CLOCK_SECONDS = 0.1
"""Shortest time between two times that the ranks are told: no duration of KV cache retention needs to be met better."""

MAX_SEQUENCES = 2**12
"""Of one request, that a front may cancel in one iteration: more than any request has."""

FrontIdentity = bytes
"""What the transport calls a front."""


class RequestBook:
    """To be used from one thread."""

    def __init__(
        self,
        max_in_flight: int = 0,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        adapters: AdapterLibrary | None = None,
        limits: RequestLimits | None = None,
        preemption_rows: int = 0,
        contexts: Contexts | None = None,
    ) -> None:
        """`max_in_flight`: waiting and active requests of all fronts together; 0 = no limit. `clock`: seconds.
        `grammars`: None = requests with a grammar are refused. `adapters`: the same for low-rank adapters. `limits`:
        None = every front has validated its requests. `preemption_rows`: rows of the ranks' batch, of which those of
        lower priority give way to others; 0 = none does. `contexts`: None = requests that are split between engines are
        refused."""
        self._max_in_flight = max_in_flight
        self._limits = limits
        self._clock = clock
        self._preemption_rows = preemption_rows
        self._active: dict[int, Request] = {}  # those that the ranks have not answered to the end
        self._queue = RequestQueue()
        self._leases = Leases(grammars, adapters, contexts)
        self._suspects = Suspects(clock)
        self._started: dict[FrontIdentity, list[int]] = {}  # requests that ranks were handed, until the fronts are told
        self._preparing: dict[int, Request] = {}  # those whose grammars or adapters are not ready
        self._fronts: dict[int, FrontIdentity] = {}  # request id -> front, of every waiting or active request
        self._returned: dict[int, tuple[FrontIdentity, Request]] = {}
        """What fronts have sent again before its first run has ended."""
        self._stops: dict[int, FinishReason] = {}
        self._cancelled_sequences: dict[int, list[int]] = {}  # request id -> indices, of active requests
        self._deadlines = Deadlines()
        self._outboxes: dict[FrontIdentity, list[Response]] = {}
        self._queued_since: dict[int, float] = {}  # clock time of arrival, of every waiting request
        self._tells_time = False  # since the first request whose blocks are kept for a limited time
        self._next_time = 0.0
        self._queue_seconds = 0.0  # that the requests of the last `take` had waited, added up

    @property
    def has_input(self) -> bool:
        """Whether there are requests, stop signals or orders to take."""
        waiting = self._queue or self._suspects.may_start or self._stops or self._cancelled_sequences
        return bool(waiting) or self._leases.has_orders

    @property
    def has_suspects(self) -> bool:
        """Whether requests wait that ranks may have died of."""
        return bool(self._suspects)

    @property
    def num_in_flight(self) -> int:
        return len(self._fronts)

    @property
    def num_queued(self) -> int:
        """Requests in flight that are waiting."""
        return len(self._queue) + len(self._suspects) + len(self._preparing)

    @property
    def is_preparing(self) -> bool:
        """Whether requests wait for grammars, adapters or contexts: `poll_preparations` is to be called often."""
        return bool(self._preparing)

    def submit(self, front: FrontIdentity, request: Request) -> None:
        request_id = request.request_id
        if request.replay is not None and self._fronts.get(request_id, front) != front:
            self._replace(front, request)
        elif request_id in self._fronts:
            self._refuse(front, request_id, DuplicateRequest(f"requestId {request_id} is already in progress"))
        elif self._max_in_flight and len(self._fronts) >= self._max_in_flight and not request.goes_on:
            self._refuse(front, request_id, QueueFull())
        elif self._is_valid(front, request):
            self._accept(front, request)

    def _replace(self, front: FrontIdentity, request: Request) -> None:
        """A front has taken these ranks for dead and connects to them again, as another one: end the run whose
        responses it does not receive, and then begin the one that it asks for."""
        self._returned[request.request_id] = front, request
        self._stop(request.request_id, FinishReason.CANCELLED, RequestCancelled("its front has sent it again"))

    def _accept(self, front: FrontIdentity, request: Request) -> None:
        try:
            if request.lora_order == "unload":
                self._leases.forget_adapter(request)
                self._outboxes.setdefault(front, []).append(_done(request.request_id))
                return
            must_wait = self._leases.take(request)
        except InvalidRequest as error:
            self._refuse(front, request.request_id, error)
            return
        request = structs.replace(request, lora_config=None) if request.lora_config is not None else request
        self._add(front, request, must_wait=must_wait)

    def _add(self, front: FrontIdentity, request: Request, *, must_wait: bool) -> None:
        """`must_wait`: until its grammar or adapter is ready."""
        request_id = request.request_id
        self._fronts[request_id] = front
        self._queued_since[request_id] = self._clock()
        if must_wait:
            self._preparing[request_id] = request
        else:
            self._enqueue(self._leases.as_ranks_get_it(request))
        retention = request.kv_cache_retention_config
        self._tells_time = self._tells_time or (retention is not None and retention.has_durations)
        if request.allotted_time_ms > 0:
            self._deadlines.set(request_id, self._queued_since[request_id] + request.allotted_time_ms / 1000)

    def _enqueue(self, request: Request) -> None:
        if request.replay is not None and request.replay.is_suspect:
            self._suspects.add(request)
        else:
            self._queue.push(request, self._fronts[request.request_id])

    def _is_valid(self, front: FrontIdentity, request: Request) -> bool:
        """Whether the queue can take it; False if it had to be refused. A front may be any program of this user."""
        try:
            if request.loaded_adapter is not None:
                raise InvalidRequest("loaded_adapter is set by the engine alone: leave it out")
            if request.context_transfer is not None:
                raise InvalidRequest("context_transfer is set by the engine alone: leave it out")
            if self._limits is not None:
                self._limits.validate_queueing(request)
                if request.context_phase_params is not None:
                    self._limits.validate(request)  # its prompt is compared here
        except InvalidRequest as error:
            self._refuse(front, request.request_id, error)
            return False
        return True

    def cancel(self, front: FrontIdentity, request_ids: Iterable[int]) -> None:
        """Stop requests of `front`; those it does not have in flight are ignored."""
        for request_id in request_ids:
            error = RequestCancelled(f"request Id {request_id} has been stopped. Request is ignored.")
            if self._fronts.get(request_id) == front:
                self._stop(request_id, FinishReason.CANCELLED, error)
            elif self._returned.get(request_id, (None,))[0] == front:
                del self._returned[request_id]
                self._refuse(front, request_id, error)

    def cancel_sequence(self, front: FrontIdentity, request_id: int, sequence_index: int) -> None:
        """Stop one sequence of a request of `front` that is active; otherwise it has no tokens that could be enough."""
        if self._fronts.get(request_id) != front or request_id in self._queued_since:
            return
        indices = self._cancelled_sequences.setdefault(request_id, [])
        if sequence_index not in indices and len(indices) < MAX_SEQUENCES:
            indices.append(sequence_index)

    def leave(self, front: FrontIdentity) -> None:
        """The front is gone: stop its requests and discard its responses."""
        self._cancel_all(front)
        self._outboxes.pop(front, None)
        self._suspects.leave(front)

    def stop_everything(self) -> None:
        for front in {*self._fronts.values(), *(front for front, _ in self._returned.values())}:
            self._cancel_all(front)

    def _cancel_all(self, front: FrontIdentity) -> None:
        self.cancel(front, [request_id for request_id, (owner, _) in self._returned.items() if owner == front])
        self.cancel(front, [request_id for request_id, owner in self._fronts.items() if owner == front])

    def take(self, max_sequences: int, *, is_idle: bool = False) -> tuple[list[Request], dict[int, FinishReason]]:
        """The ranks' input for this iteration: new requests, and stops of active requests.

        The new requests have at most `max_sequences` sequences together; a negative number means no limit. The head of
        the queue is never overtaken: if it has more sequences than there is room for, everybody waits behind it. An
        idle engine takes the head whatever its width, as there will never be more room. Those that
        displace active requests of lower priority come in addition.
        """
        self.poll_preparations()
        now = self._clock()
        self._expire(now)
        if self._suspects.hold_others:
            some_are_active = self.num_in_flight > self.num_queued
            requests = self._suspects.take(some_are_active=some_are_active) if max_sequences or is_idle else []
        else:
            requests = self._take_queued(max_sequences if max_sequences >= 0 else math.inf, is_idle=is_idle)
        for request in requests:
            self._active[request.request_id] = request
            self._leases.begun(request.request_id)
            self._started.setdefault(self._fronts[request.request_id], []).append(request.request_id)
        self._queue_seconds = sum(now - self._queued_since.pop(request.request_id) for request in requests)
        stops, self._stops = self._stops, {}
        return requests, stops

    def _take_queued(self, room: float, *, is_idle: bool) -> list[Request]:
        requests: list[Request] = []
        while self._queue:
            head = self._queue.head()
            if head.num_sequences > room and (requests or not is_idle) and not self._displaces(head, requests):
                break
            room -= head.num_sequences
            requests.append(self._queue.pop())
        return requests

    def _displaces(self, head: Request, taken: list[Request]) -> bool:
        """Whether the ranks' batch holds it beside all active requests that are as important: it displaces others."""
        if not self._preemption_rows:
            return False
        as_important = [each for each in (*self._active.values(), *taken) if each.priority >= head.priority]
        return sum(each.num_sequences for each in (*as_important, head)) <= self._preemption_rows

    def await_confirmation(self, front: FrontIdentity) -> None:
        """No suspect begins before the front has confirmed what it was just sent."""
        self._suspects.await_confirmation(front)

    def confirmed(self, front: FrontIdentity) -> None:
        """The front has got the oldest message that it had not confirmed."""
        self._suspects.confirmed(front)

    def take_started(self) -> dict[FrontIdentity, list[int]]:
        """Ids of the requests that ranks were handed since the last call, by front."""
        started, self._started = self._started, {}
        return started

    def take_cancelled_sequences(self) -> list[tuple[int, int]]:
        """Sequences of active requests that all ranks are to end in this iteration: (request id, index)."""
        taken, self._cancelled_sequences = self._cancelled_sequences, {}
        return [(request_id, index) for request_id, indices in taken.items() for index in indices]

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

    def take_adapter_orders(self) -> AdapterOrders:
        """What all ranks are to store and to drop before they take the next requests."""
        return self._leases.take_orders()

    def take_block_orders(self) -> BlockOrders:
        """What all ranks are to fetch from other engines, and to drop, likewise."""
        return self._leases.take_block_orders()

    def poll_preparations(self) -> None:
        """Queue the requests whose grammars and adapters have become ready, in order of arrival, and refuse those of
        broken ones and those whose time is over."""
        if not self._preparing:
            return
        self._expire(self._clock())
        self._leases.poll()
        for request_id, request in list(self._preparing.items()):
            reason = self._leases.broken_reason(request_id)
            if reason:
                self._end_preparing(request_id, Response.of_error(request_id, InvalidRequest(reason)))
            elif self._leases.are_ready(request_id):
                if request.lora_order:
                    self._end_preparing(request_id, _done(request_id))
                else:
                    del self._preparing[request_id]
                    self._enqueue(self._leases.as_ranks_get_it(request))

    def _end_preparing(self, request_id: int, response: Response) -> None:
        front = self._fronts[request_id]
        del self._preparing[request_id]
        self._forget(request_id)
        self._outboxes.setdefault(front, []).append(response)

    def respond(self, response: Response) -> None:
        """Keep a response of the ranks for the front that sent the request."""
        request_id = response.request_id
        front = self._fronts.get(request_id)
        if front is None:
            return
        self._suspects.answered(request_id)
        self._outboxes.setdefault(front, []).append(self._leases.answered(response))
        if response.is_final:
            self._forget(request_id)

    def complete(self, stats: IterationStats) -> IterationStats:
        """`stats` with what only the leader knows of the iteration: who waits here, and how long the new ones did."""
        num_queued = len(self._queue) + len(self._suspects)
        if not (num_queued or self._queue_seconds):
            return stats
        return structs.replace(
            stats,
            num_queued_requests=num_queued,
            new_active_requests_queue_latency_ms=self._queue_seconds * 1000,
        )

    def collect_responses(self) -> dict[FrontIdentity, list[Response]]:
        """All responses kept since the last call."""
        outboxes, self._outboxes = self._outboxes, {}
        return outboxes

    def _expire(self, now: float) -> None:
        for request_id in self._deadlines.passed(now):
            text = f"request Id {request_id} waited longer than the time it was allotted"
            self._stop(request_id, FinishReason.TIMED_OUT, RequestTimedOut(text))

    def _stop(self, request_id: int, reason: FinishReason, error_if_waiting: InflightError) -> None:
        was_preparing = self._preparing.pop(request_id, None) is not None
        if was_preparing or self._suspects.discard(request_id) or self._queue.discard(request_id):
            front = self._fronts[request_id]
            self._forget(request_id)
            self._refuse(front, request_id, error_if_waiting)
        else:
            self._stops.setdefault(request_id, reason)

    def _forget(self, request_id: int) -> None:
        del self._fronts[request_id]
        self._active.pop(request_id, None)
        self._deadlines.drop(request_id)
        self._queued_since.pop(request_id, None)
        self._stops.pop(request_id, None)
        self._cancelled_sequences.pop(request_id, None)
        self._leases.release(request_id)
        if request_id in self._returned:
            self.submit(*self._returned.pop(request_id))

    def _refuse(self, front: FrontIdentity, request_id: int, error: InflightError) -> None:
        self._outboxes.setdefault(front, []).append(Response.of_error(request_id, error))


def _done(request_id: int) -> Response:
    """The answer to an order: no tokens."""
    result = Result(
        finish_reason=FinishReason.END_ID, is_final=True, is_sequence_final=True, request_perf_metrics=PerfMetrics()
    )
    return Response(request_id=request_id, result=result)
