"""The leader's socket, through which the fronts of one engine reach it.

One ZeroMQ ROUTER on a UNIX socket that only this user may open. It is used on the worker loop's thread: between two
steps, and while no request is active the loop waits in it. Invalid messages are dropped and logged. A front that has
ended is noticed when the next message to it cannot be sent. Does not know MPI or models.
"""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path

import zmq

from inflight.engine_description import EngineDescription
from inflight.executor.rank.leader.contexts import Contexts
from inflight.executor.rank.leader.request_book import RequestBook
from inflight.executor.wire.block_messages import NO_BLOCK_ORDERS
from inflight.executor.wire.messages import (
    MAX_FRONT_ID,
    MAX_MESSAGE_BYTES,
    NO_INPUT,
    BadMessage,
    Cancel,
    CancelSequence,
    Fatal,
    FromLeader,
    Goodbye,
    Heartbeat,
    Hello,
    Iterations,
    KvCacheEvents,
    Occupied,
    RankInput,
    Received,
    Responses,
    Shutdown,
    Started,
    Stats,
    Submit,
    Welcome,
    decode_from_front,
    encode_frames,
)
from inflight.kv_cache_events import KVCacheEvent
from inflight.lora import NO_ORDERS
from inflight.request_limits import RequestLimits
from inflight.result import Response
from inflight.runtime.adapters.adapter_library import AdapterLibrary
from inflight.runtime.guided.grammars import Grammars
from inflight.stats import IterationStats, RequestStatsPerIteration

logger = logging.getLogger(__name__)

PREPARATION_POLL_MS = 1
"""How often grammars and adapters are looked after that requests wait for while nothing else happens."""
LINGER_MS = 1000
"""Time to transmit messages that are still queued when the socket is closed."""


class LeaderSocket:
    """Implements rank.callbacks.Leader."""

    def __init__(
        self,
        path: Path,
        *,
        limits: RequestLimits,
        description: EngineDescription,
        max_in_flight: int = 0,
        grammars: Grammars | None = None,
        adapters: AdapterLibrary | None = None,
        tick_seconds: float = 1.0,
        stats_seconds: float = 0.05,
        preemption_rows: int = 0,
        contexts: Contexts | None = None,
    ) -> None:
        """`path`: of the socket. `tick_seconds`: interval at which all ranks must answer. `stats_seconds`: shortest
        time between two reports of a busy engine's statistics. `preemption_rows`, `contexts`: see RequestBook."""
        self._limits = limits
        self._description = description
        self._max_in_flight = max_in_flight
        self._tick_seconds = tick_seconds
        self._stats_seconds = stats_seconds
        self._book = RequestBook(
            max_in_flight,
            grammars=grammars,
            adapters=adapters,
            limits=limits,
            preemption_rows=preemption_rows,
            contexts=contexts,
        )
        self._fronts: dict[bytes, Hello] = {}
        """ZeroMQ identity of each front -> how it introduced itself."""
        self._iterations = Iterations()
        """Statistics that fronts have asked for and that were not sent yet."""
        self.wants_iteration_stats = False
        self.wants_request_stats = False
        self._kv_cache_events: list[KVCacheEvent] = []
        """The same of the cached blocks."""
        self.wants_kv_cache_events = False
        self._num_bad_messages = 0
        self._shutdown = False
        self._end_reason = ""
        self._stats: str | None = None
        self._latest_stats: str | None = None
        self._next_stats = 0.0
        self._next_tick = time.monotonic() + tick_seconds
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._bind(path)

    def wait_for_front(self) -> None:
        """Sleep until a front has sent something."""
        self._socket.poll()

    # -- Leader --------------------------------------------------------------------------------------------------------

    def next_input(self, max_requests: int, may_block: bool) -> RankInput:
        self._flush(everything=may_block)
        self._receive_all()
        while may_block and not self._book.has_input and not self._shutdown:
            self._flush()
            remaining = self._next_tick - time.monotonic()
            if remaining <= 0:
                break
            self._socket.poll(PREPARATION_POLL_MS if self._book.is_preparing else math.ceil(remaining * 1000))
            self._receive_all()
            self._book.poll_preparations()
        requests, stops = self._book.take(0) if self._shutdown else self._book.take(max_requests, is_idle=may_block)
        sequences, adapters = self._book.take_cancelled_sequences(), self._book.take_adapter_orders()
        blocks = self._book.take_block_orders()
        self._flush()
        tick, now_ms = time.monotonic() >= self._next_tick, self._book.time_to_tell()
        has_orders = adapters is not NO_ORDERS or blocks is not NO_BLOCK_ORDERS
        if not (requests or stops or sequences or has_orders or tick or now_ms or self._shutdown):
            return NO_INPUT
        return RankInput(
            requests=requests,
            stops=stops,
            cancelled_sequences=sequences,
            adapters=adapters,
            blocks=blocks,
            tick=tick,
            shutdown=self._shutdown,
            now_ms=now_ms,
        )

    def respond(self, response: Response) -> None:
        self._book.respond(response)

    def wants_stats(self) -> bool:
        return bool(self._fronts) and time.monotonic() >= self._next_stats

    def report_stats(self, json: str) -> None:
        self._stats = self._latest_stats = json

    def report_iteration(self, stats: IterationStats | None, requests: RequestStatsPerIteration | None) -> None:
        if stats is not None:
            self._iterations.iteration_stats.append(self._book.complete(stats))
        if requests is not None:
            self._iterations.request_stats.append(requests)

    def report_kv_cache_events(self, events: list[KVCacheEvent]) -> None:
        self._kv_cache_events += events

    def all_ranks_answered(self) -> None:
        self._next_tick = time.monotonic() + self._tick_seconds
        for front in list(self._fronts):
            self._send(front, Heartbeat())

    # -- the end -------------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Tell every front that the ranks end, and why."""
        for front in list(self._fronts):
            self._send(front, Fatal(reason))

    def end(self, reason: str) -> None:
        """End the ranks; fronts keep what is in flight for others. May be called from any thread."""
        self._end_reason = reason

    def close(self) -> None:
        """Send the remaining responses and close the socket."""
        self._flush(everything=True)
        self._socket.close(linger=LINGER_MS)
        self._context.term()

    # -- the socket ----------------------------------------------------------------------------------------------------

    def _bind(self, path: Path) -> None:
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        previous = os.umask(0o177)
        try:
            self._socket.bind(f"ipc://{path}")
        finally:
            os.umask(previous)

    def _receive_all(self) -> None:
        if self._end_reason and not self._shutdown:
            self.fail(self._end_reason)
            self._fronts.clear()  # what follows is nobody's
            self._shut_down()
        while True:
            try:
                front, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise BadMessage(f"{len(frames)} frames instead of one")
                self._handle(front, frames[0])
            except BadMessage as error:
                self._num_bad_messages += 1
                if self._num_bad_messages & (self._num_bad_messages - 1) == 0:  # log the 1st, 2nd, 4th, 8th, ...
                    logger.warning("dropped invalid message number %d: %s", self._num_bad_messages, error)

    def _handle(self, front: bytes, frame: bytes) -> None:
        message = decode_from_front(frame)
        if isinstance(message, Hello):
            self._greet(front, message)
        elif front not in self._fronts:
            raise BadMessage(f"{type(message).__name__} before Hello")
        elif isinstance(message, Submit):
            for request in message.requests:
                self._book.submit(front, request)
        elif isinstance(message, Cancel):
            self._book.cancel(front, message.request_ids)
        elif isinstance(message, CancelSequence):
            self._book.cancel_sequence(front, message.request_id, message.sequence_index)
        elif isinstance(message, Received):
            self._book.confirmed(front)
        elif isinstance(message, Goodbye):
            self._part_from(front)
        elif isinstance(message, Shutdown):
            self._shut_down()

    def _shut_down(self) -> None:
        self._shutdown = True
        self._book.stop_everything()

    def _greet(self, front: bytes, hello: Hello) -> None:
        if not 1 <= hello.front_id <= MAX_FRONT_ID:
            raise BadMessage(f"front id {hello.front_id}")
        if any(each != front and other.front_id == hello.front_id for each, other in self._fronts.items()):
            self._send(front, Occupied())
            return
        if front not in self._fronts:
            logger.info("front %d (process %d) connected", hello.front_id, hello.pid)
        self._fronts[front] = hello
        if hello.wants_kv_cache_events and not self.wants_kv_cache_events:
            self._next_tick = 0.0  # after which an idle engine reports what it has kept, too
        self._note_wishes()
        welcome = Welcome(
            limits=self._limits,
            description=self._description,
            max_in_flight=self._max_in_flight,
            pid=os.getpid(),
        )
        self._send(front, welcome)
        if self._latest_stats is not None:
            self._send(front, Stats(self._latest_stats, self._book.num_queued))

    def _flush(self, everything: bool = False) -> None:
        """Send each front one message with all its responses, and the newest statistics if `everything` or if due."""
        for front, started in self._book.take_started().items():
            self._send(front, Started(started))
        for front, responses in self._book.collect_responses().items():
            if self._end_reason:
                continue  # what fronts have in flight is to go on with other ranks
            to_be_confirmed = self._book.has_suspects
            if to_be_confirmed:
                self._book.await_confirmation(front)
            self._send(front, Responses(responses, to_be_confirmed))
        has_stats = self._stats is not None or self._iterations.iteration_stats or self._iterations.request_stats
        if (has_stats or self._kv_cache_events) and (everything or time.monotonic() >= self._next_stats):
            self._next_stats = time.monotonic() + self._stats_seconds
            self._send_stats()

    def _send_stats(self) -> None:
        if self._stats is not None:
            stats, self._stats = Stats(self._stats, self._book.num_queued), None
            for front in list(self._fronts):
                self._send(front, stats)
        iterations, self._iterations = self._iterations, Iterations()
        for front, hello in list(self._fronts.items()):
            wanted = Iterations(
                iteration_stats=iterations.iteration_stats if hello.wants_iteration_stats else [],
                request_stats=iterations.request_stats if hello.wants_request_stats else [],
            )
            if wanted != Iterations():
                self._send(front, wanted)

        events, self._kv_cache_events = self._kv_cache_events, []
        for front, hello in list(self._fronts.items()) if events else ():
            if hello.wants_kv_cache_events:
                self._send(front, KvCacheEvents(events))

    def _note_wishes(self) -> None:
        self.wants_iteration_stats = any(hello.wants_iteration_stats for hello in self._fronts.values())
        self.wants_request_stats = any(hello.wants_request_stats for hello in self._fronts.values())
        self.wants_kv_cache_events = any(hello.wants_kv_cache_events for hello in self._fronts.values())

    def _send(self, front: bytes, message: FromLeader) -> None:
        try:
            # Long frames are not copied: this is the loop's thread, and tensors may have hundreds of megabytes.
            self._socket.send_multipart([front, *encode_frames(message)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._part_from(front)

    def _part_from(self, front: bytes) -> None:
        hello = self._fronts.pop(front, None)
        logger.info("front %d disconnected", hello.front_id if hello is not None else 0)
        self._note_wishes()
        self._book.leave(front)
