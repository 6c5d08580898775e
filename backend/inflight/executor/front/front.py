"""The Executor API, and the state behind it that every front keeps: requests in flight, responses not fetched yet, and
the state of the engine's replicas.

Each accepted request gets exactly one final response, whatever happens to the ranks. It goes to one replica, which the
router chooses. Requests in flight when a replica's ranks are lost go on from their last delivered tokens on another
one, or wait for new ranks, as do those that arrive while none serves; the journal says which cannot. Knows requests and
responses; does not know tensors, text, tritonserver, processes or sockets: a subclass sends requests to the leaders and
reports when a replica becomes ready and when it is lost.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import overload

from msgspec import structs
from typing_extensions import Self

from inflight.config import EngineConfig
from inflight.engine_description import EngineDescription
from inflight.errors import EngineUnavailable, InvalidRequest, QueueFull, RequestError
from inflight.executor.front.engine_state import ACCEPTING, EngineState
from inflight.executor.front.journal import Journal
from inflight.executor.front.journal_entry import JournalEntry
from inflight.executor.front.last_check import LastCheck
from inflight.executor.front.ready_responses import ReadyResponses, ResponsesChanged
from inflight.executor.front.replicas import Replicas
from inflight.executor.front.request_ids import RequestIds
from inflight.executor.front.sent_adapters import adapter_order, brings_adapter
from inflight.executor.front.statistics import FrontStatistics
from inflight.executor.front.statistics_api import StatisticsApi
from inflight.executor.wire.messages import as_received
from inflight.generation_defaults import GenerationDefaults
from inflight.guided_decoding import GuidedDecodingParams
from inflight.guides.requests import with_grammar
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, Response

NOT_AVAILABLE = "the engine is not available: its ranks are dead"
SHUT_DOWN = "the engine was shut down"


class Front(StatisticsApi):
    """One engine as a process sees it that sends requests to it. All methods are safe to use from several threads.

    Each accepted request ends with exactly one final Response; if the ranks die and the request cannot go on with new
    ones, it is an error with the code UNAVAILABLE. As a context manager it is started, unless it has been, and shut
    down at the end.

    One lock protects all state. Nothing that may block is called while it is held.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        generation_defaults: GenerationDefaults | None = None,
        *,
        num_replicas: int = 1,
        keeps_statistics: bool = True,
    ) -> None:
        """`config`: of this front; its rings of statistics and KV cache events are as long as it says, and requests are
        routed to replicas as it says. `num_replicas`: of the engine. `keeps_statistics`: if False it has none, because
        nobody would read them."""
        config = config or EngineConfig()
        self._generation_defaults = generation_defaults or GenerationDefaults()
        super().__init__(FrontStatistics(config, num_replicas=num_replicas, has_rings=keeps_statistics))
        self._changed = ResponsesChanged(self._lock)
        self._replicas = Replicas(num_replicas, config)
        self._ids = RequestIds()
        self._journal = Journal(config)
        self._responses = ReadyResponses()
        self._num_losses = 0
        self._last_check = LastCheck(config) if config.guided_decoding_check else None

    @property
    def _state(self) -> EngineState:
        return self._replicas.state

    def _is_closed(self) -> bool:
        return self._state is EngineState.CLOSED

    # -- the engine ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Launch or find the ranks and wait until they serve. To be called once.

        Raises ConfigurationError with the reason that the ranks gave."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the ranks that this front started, and wait for their end; requests in flight get an UNAVAILABLE error.
        Safe to call twice."""

    def __enter__(self) -> Self:
        if self._state is EngineState.STARTING:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def max_in_flight(self) -> int:
        """Requests that the engine takes from all fronts together; 0 = no limit, or it was not ready yet."""
        return self._replicas.max_in_flight

    @property
    def limits(self) -> RequestLimits:
        """Bounds on the requests that the engine can serve. Raises EngineUnavailable before it was ready."""
        limits = self._replicas.limits
        if limits is None:
            raise EngineUnavailable(NOT_AVAILABLE)
        return limits

    @property
    def description(self) -> EngineDescription:
        """What the ranks compute, and with what; known once they are ready."""
        return self._replicas.description

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """How the checkpoint wants tokens chosen where a request does not say."""
        return self._generation_defaults

    def is_ready(self) -> bool:
        """True while the engine serves: every rank of a replica is alive and answers."""
        return self._state is EngineState.READY

    @property
    def num_replicas(self) -> int:
        """Replicas of the engine: data_parallel_size."""
        return len(self._replicas)

    def ready_replicas(self) -> list[bool]:
        """Whether every rank is alive and answers, of each replica."""
        return [state is EngineState.READY for state in self._replicas.states()]

    def is_relaunching(self) -> bool:
        """True while lost ranks are being relaunched and no replica serves: requests are accepted and wait. The last
        relaunch begins worker_start_timeout_ms after the loss at the latest; if it fails, too, the engine is down."""
        return self._state is EngineState.RELAUNCHING

    def is_down(self) -> bool:
        """True if the ranks of every replica were lost and could not be relaunched: requests are refused until that
        succeeds."""
        return self._state is EngineState.DOWN

    def can_enqueue_requests(self) -> bool:
        """Whether this process may send requests: every front may, until it is shut down."""
        return not self._is_closed()

    def is_participant(self) -> bool:
        """Whether this process is one of the engine's ranks."""
        return False

    # -- requests ------------------------------------------------------------------------------------------------------

    def next_request_id(self) -> int:
        """A fresh id, unique among all fronts of the engine."""
        with self._lock:
            return self._ids.draw()

    def enqueue_request(self, request: Request) -> int:
        """Send a request without waiting for the engine, and return its id: a fresh one if it has none.

        Raises InvalidRequest (checked against `limits`), DuplicateRequest, QueueFull ("Exceeds maximum queue size") or
        EngineUnavailable. After an exception there will be no Response.
        """
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Send several requests, all or none, and return their ids in order. Raises what enqueue_request raises."""
        self._check_available()
        limits = self.limits
        numbered = [self._number(with_grammar(as_received(request), limits)) for request in requests]
        for request in numbered:
            limits.validate(request)
        ready = [(request, self._encode(request), self._replicas.prefix(request)) for request in numbered]
        request_ids = [request.request_id for request in numbered]
        with self._lock:
            self._check_available()
            self._journal.check_free(request_ids)
            max_in_flight = self._replicas.max_in_flight
            if max_in_flight and len(self._journal) + len(numbered) > max_in_flight:
                raise QueueFull()
            for request, message, prefix in ready:
                self._send(self._journal.accept(request), prefix, message)
        return request_ids

    def _send(self, entry: JournalEntry, prefix: list[bytes], encoded: object | None = None) -> None:
        """Send a request that no ranks know to a replica that serves, if there is one. `encoded`: the request as it
        came. Called with the lock held."""
        replica = self._replicas.choose(entry.num_tokens, prefix, entry.suspicion.only_replica, entry.phase)
        if replica is None:
            entry.has_waited = True
            return
        entry.phase = self._replicas.phase_at(replica, entry.phase)
        placement = self._replicas.place(entry.num_tokens, prefix, replica)
        message = self._journal.message(entry, placement, time.monotonic())
        try:
            if encoded is None or message is not entry.request:
                encoded = self._encode(message)
            if not entry.num_replays and not entry.is_second_half:
                self._tell_others(entry.request, replica)
        except RequestError as error:
            self._responses.extend(self._journal.fail(entry, error))
        else:
            self._send_request(replica, entry.request.request_id, encoded)

    def _tell_others(self, request: Request, replica: int) -> None:
        """What a request says of an adapter to `replica` holds for all: later ones, of other fronts too, may go
        elsewhere."""
        if not brings_adapter(request):
            return
        for other in self._replicas.ready():
            if other != replica:
                self._send_request(other, 0, self._encode(adapter_order(request, self._ids.draw())))

    def _send_waiting(self) -> None:
        """What waits for ranks, as far as some serve. Called with the lock held."""
        for entry in self._journal.unsent():
            self._send(entry, self._replicas.prefix(entry.request))

    def cancel_request(self, request_id: int) -> None:
        """Ask for an early end. An active request ends with its tokens so far (CANCELLED); unknown ids are ignored."""
        with self._changed:
            entry = self._journal.get(request_id)
            if entry is None:
                return
            if entry.placement is not None:
                entry.cancel()
                self._send_cancel(entry.placement.replica, request_id)
            else:
                self._responses.extend(self._journal.end(entry, FinishReason.CANCELLED))
                self._changed.notify_all()

    def cancel_sequence(self, request_id: int, sequence_index: int) -> None:
        """Ask for an early end of one sequence of an active request, which ends with its tokens so far (CANCELLED). The
        request ends with its last sequence. Beams end together only: one of them, and what is unknown, is ignored."""
        with self._changed:
            entry = self._journal.get(request_id)
            if entry is None:
                return
            if entry.placement is not None:
                entry.cancel_sequence(sequence_index)
                self._send_cancel_sequence(entry.placement.replica, request_id, sequence_index)
            else:
                self._responses.extend(self._journal.end_sequence(entry, sequence_index))
                self._changed.notify_all()

    def num_requests_in_flight(self) -> int:
        """Accepted requests that have not received their final response."""
        return len(self._journal)

    def num_replays(self) -> int:
        """Requests of this front that were sent again to other ranks, each time."""
        return self._journal.num_replays

    def num_handovers(self) -> int:
        """Requests of this front whose prompts one replica has computed, for another one to go on."""
        return self._journal.num_handovers

    def num_pauses(self) -> int:
        """Times that requests of this front were in flight when ranks were lost, and waited for others."""
        return self._journal.num_pauses

    def num_losses(self) -> int:
        """Times that a replica's ranks were lost and a relaunch began."""
        return self._num_losses

    def check_text(self, name: str, params: GuidedDecodingParams, text: str) -> None:
        """Hold a part of an answer against a guide of its own, where answers are (`guided_decoding_check`). `name`: it,
        for the log. Does not wait."""
        if self._last_check is not None:
            self._last_check.note_text(name, params, text)

    def num_answers_checked(self) -> int:
        """Answers that ended by themselves and were held against their guides (`guided_decoding_check`)."""
        return self._last_check.num_checked if self._last_check else 0

    def num_answers_failed(self) -> int:
        """Of these, the ones that did not follow them."""
        return self._last_check.num_failed if self._last_check else 0

    def num_spares(self) -> int:
        """Loaded sets of ranks that wait to take the place of this front's own ranks, if these die."""
        return 0

    # -- responses -----------------------------------------------------------------------------------------------------

    @overload
    def await_responses(self, request_ids: int | None = None, timeout: float | None = None) -> list[Response]: ...

    @overload
    def await_responses(self, request_ids: Sequence[int], timeout: float | None = None) -> list[list[Response]]: ...

    def await_responses(
        self, request_ids: int | Sequence[int] | None = None, timeout: float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Wait for responses and return all that have arrived; each is returned once.

        Without `request_ids`: those of any request, at least one. With an id: those of this request, at least one. With
        several ids: a list for each, in their order, once every one has some. After `timeout` seconds, or once the
        executor is shut down, what there is, which may be []. A request that is not in flight and has no response left
        is answered with an error at once, because nothing would ever arrive for it. Raises InvalidRequest if an id is
        given twice: only one of the two could get its responses.
        """
        if request_ids is None:
            with self._changed:
                self._changed.wait_for(lambda: self._responses or self._is_closed(), timeout)
                return self._responses.take_all()
        if isinstance(request_ids, int):
            return self._await([request_ids], timeout)[0]
        if len(set(request_ids)) < len(request_ids):
            raise InvalidRequest("an id is given twice among those whose responses are awaited")
        return self._await(request_ids, timeout)

    def get_num_responses_ready(self, request_id: int | None = None) -> int:
        """Responses that await_responses would return at once: of one request, or of all."""
        with self._lock:
            return self._responses.count(request_id)

    def listen(self, listener: Callable[[list[Response]], None]) -> None:
        """From now on nobody awaits responses: `listener` is called with all that have arrived at once, on the thread
        that has received them. It must neither block nor use this front."""

        def tell() -> None:
            if self._responses:
                listener(self._responses.take_all())

        with self._changed:
            self._changed.tell = tell
            self._changed.notify_all()

    def _await(self, request_ids: Sequence[int], timeout: float | None) -> list[list[Response]]:
        with self._changed:
            self._changed.wait_for(
                lambda: all(id_ in self._responses or id_ not in self._journal for id_ in request_ids), timeout
            )
            return [self._take(request_id) for request_id in request_ids]

    def _take(self, request_id: int) -> list[Response]:
        if request_id in self._responses or request_id in self._journal:
            return self._responses.take(request_id)
        text = f"request Id {request_id} is not in flight: all of its responses were returned, or it was never sent"
        return [Response.of_error(request_id, InvalidRequest(text))]

    # -- for subclasses: sending to the leader -------------------------------------------------------------------------

    @abstractmethod
    def _encode(self, request: Request) -> object:
        """The request in the form that _send_request takes. Raises RequestError. Called without the lock."""

    @abstractmethod
    def _send_request(self, replica: int, request_id: int, encoded: object) -> None:
        """Queue it for sending to the leader of `replica`, without waiting; the order of calls is kept. `request_id`: 0
        for an order whose answer nobody waits for. Called with the lock held."""

    @abstractmethod
    def _send_cancel(self, replica: int, request_id: int) -> None:
        """The same for a cancellation. Called with the lock held."""

    @abstractmethod
    def _send_cancel_sequence(self, replica: int, request_id: int, sequence_index: int) -> None:
        """The same for one sequence."""

    @abstractmethod
    def _drop_unsent(self, replica: int) -> None:
        """Discard what is queued for it and not sent yet. Called with the lock held."""

    # -- for subclasses: reports about the engine ----------------------------------------------------------------------

    def _replica_ready(
        self, limits: RequestLimits, description: EngineDescription, max_in_flight: int, replica: int = 0
    ) -> None:
        """The ranks of `replica` serve. What waits for ranks is sent."""
        with self._changed:
            if self._is_closed():
                return
            self._replicas.note_ready(replica, limits, description, max_in_flight)
            self._send_waiting()
            self._changed.notify_all()

    def _replica_lost(self, state: EngineState, sentence: str, replica: int = 0, *, planned: bool = False) -> int:
        """The ranks of `replica` are lost, or, if `state` is CLOSED, this front is shut down. While another replica
        serves or the lost one is relaunched (RELAUNCHING), requests in flight and later ones go on there or wait, but
        for those that cannot. Otherwise all in flight fail with the message `sentence`, and later ones are refused.
        `planned`: the ranks are being replaced, and no request is to blame. Returns how many have ended."""
        with self._changed:
            if self._is_closed() and state is not EngineState.CLOSED:
                return 0
            if state is EngineState.CLOSED and self._last_check is not None:
                self._last_check.end()
            for index in range(len(self._replicas)) if state is EngineState.CLOSED else [replica]:
                self._replicas.note_state(index, state)
                self._drop_unsent(index)
                self._statistics.forget_state(index)
            num_before = len(self._journal)
            if self._state not in ACCEPTING:
                self._responses.extend(self._journal.fail_all(EngineUnavailable(sentence)))
            elif state is EngineState.RELAUNCHING:
                self._num_losses += not planned
                self._responses.extend(self._journal.ranks_died(replica, planned=planned))
            else:
                self._journal.release(replica)
            self._send_waiting()
            if state is EngineState.RELAUNCHING:
                self._journal.note_pause()
            self._changed.notify_all()
            self._stats_arrived.notify_all()
            return num_before - len(self._journal)

    def _end_overdue(self) -> None:
        """End what was allotted less time than it waits for ranks."""
        with self._changed:
            ended = self._journal.end_overdue(time.monotonic())
            if ended:
                self._responses.extend(ended)
                self._changed.notify_all()

    def _note_started(self, request_ids: Iterable[int]) -> None:
        with self._lock:
            self._journal.note_started(request_ids)

    def _note_heartbeat(self, replica: int) -> None:
        with self._lock:
            self._journal.note_heartbeat(replica)

    def _deliver(self, responses: Iterable[Response]) -> None:
        with self._changed:
            for response in responses:
                entry = None if self._last_check is None else self._journal.get(response.request_id)
                noted = self._journal.note(response)
                self._responses.extend(noted)
                if self._last_check is not None and entry is not None:
                    self._last_check.note(entry, noted)
            for entry in self._journal.take_handed_over():
                self._send(entry, self._replicas.prefix(entry.request))
            self._changed.notify_all()

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_available(self) -> None:
        if self._state not in ACCEPTING:
            raise EngineUnavailable(SHUT_DOWN if self._is_closed() else NOT_AVAILABLE)

    def _number(self, request: Request) -> Request:
        return request if request.request_id else structs.replace(request, request_id=self.next_request_id())
