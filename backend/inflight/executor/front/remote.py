"""A front of an engine in other processes: its launcher starts the ranks or finds them, it exchanges messages with
their leader, and it starts or finds new ranks when they are lost.

One thread does all of it and owns the socket and the launcher. One launch (`RunningLaunch`) passes through

    open ── Welcome: send the journal ──> serve ── a process ends, or the heartbeat is overdue ──> lost: what is in
      ^                                                                   │ flight waits; end what is left of the ranks
      └──────────────────────────────── after a pause ────────────────────┘

What is in flight waits through several tries to open a launch (`Relaunches` says for how long). Only the launcher knows
how the ranks are started, and whether this front or another one starts them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from inflight.backoff import Backoff
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError, InvalidRequest
from inflight.executor.front.engine_state import EngineState
from inflight.executor.front.front import SHUT_DOWN, Front
from inflight.executor.front.journal_entry import RANKS_LOST
from inflight.executor.front.link import EngineLink
from inflight.executor.front.relaunches import MAX_TRIES, LaunchEnd, Relaunches
from inflight.executor.front.watch import Watch
from inflight.executor.wire.launcher import Launcher, RunningLaunch
from inflight.executor.wire.messages import (
    MAX_MESSAGE_BYTES,
    Cancel,
    CancelSequence,
    Fatal,
    FromLeader,
    Goodbye,
    Hello,
    Iterations,
    KvCacheEvents,
    Occupied,
    Responses,
    Shutdown,
    Started,
    Stats,
    Submit,
    Welcome,
    encode,
)
from inflight.generation_defaults import GenerationDefaults
from inflight.request import Request

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 3.0
"""Time that the ranks have to end by themselves at a shutdown before they are killed."""
FIND_SECONDS = 0.2
"""Interval between attempts to find an engine that another front has not launched yet."""
LOOK_SECONDS = 0.1
"""How often it is looked whether the time of a request has passed that waits for ranks."""
LAST_WORDS_MS = 20
"""For a message that the system has taken from ranks that ended meanwhile."""
OVERSLEPT_SECONDS = 1.0
"""If a wait exceeds its timeout by more than this, this process was suspended, and missed heartbeats prove nothing."""

NOT_BACK = "the engine's ranks could not be brought back"


class RemoteFront(Front):
    """A front over a Launcher."""

    def __init__(
        self,
        config: EngineConfig,
        launcher: Launcher,
        *,
        keep_trying: bool = True,
        keeps_statistics: bool = True,
        on_engine_death: Callable[[str], None] | None = None,
    ) -> None:
        """`keep_trying`: if False, relaunches end when requests do not wait for them any more; the next one then needs
        a call of relaunch(). `keeps_statistics`: see Front. `on_engine_death(reason)` is called on the front's thread
        once it is known which requests wait for new ranks and which fail; it must not block. Raises ConfigurationError
        for a wrong generation_config.json."""
        super().__init__(config, GenerationDefaults.load(config), keeps_statistics=keeps_statistics)
        self._config = config
        self._launcher = launcher
        self._keep_trying = keep_trying
        self._on_engine_death = on_engine_death
        self._outbox: deque[tuple[int, bytes]] = deque()
        """(request id, encoded message) of messages that are not sent yet."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._settled = threading.Event()
        """Set when the first launch has begun to serve or has failed."""
        self._start_error: str | None = None
        self._closing = threading.Event()
        self._relaunch_asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-front", daemon=True)

    # -- the engine ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        atexit.register(self.shutdown)
        self._thread.start()
        self._settled.wait()
        if self._start_error is not None:
            self.shutdown()
            raise ConfigurationError(self._start_error)

    def shutdown(self) -> None:
        self._closing.set()
        self._relaunch_asked.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._engine_lost(EngineState.CLOSED, SHUT_DOWN)
        atexit.unregister(self.shutdown)

    def relaunch(self) -> None:
        """Relaunch lost ranks now, without waiting for the backoff. Does nothing unless the ranks are lost."""
        if self._state in (EngineState.RELAUNCHING, EngineState.DOWN):
            self._relaunch_asked.set()

    def engine_pids(self) -> list[int]:
        """Ids of the running processes of the engine on this machine that this front started."""
        return self._launcher.pids()

    # -- Front ---------------------------------------------------------------------------------------------------------

    def _encode(self, request: Request) -> object:
        frame = encode(Submit([request]))
        if len(frame) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(f"the request is larger than {MAX_MESSAGE_BYTES} bytes")
        return frame

    def _send_request(self, request_id: int, encoded: object) -> None:
        assert isinstance(encoded, bytes)
        self._outbox.append((request_id, encoded))

    def _send_cancel(self, request_id: int) -> None:
        self._outbox.append((request_id, encode(Cancel([request_id]))))

    def _send_cancel_sequence(self, request_id: int, sequence_index: int) -> None:
        self._outbox.append((request_id, encode(CancelSequence(request_id, sequence_index))))

    def _drop_unsent(self) -> None:
        self._outbox.clear()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = Backoff()
        # What another process launches is only looked for, as often as there is time.
        max_tries = MAX_TRIES if self._launcher.owns_ranks else math.inf
        relaunches = Relaunches(self._config.worker_start_timeout_ms / 1000, max_tries)
        while True:
            try:
                end = self._run_launch(backoff)
            except Exception as error:
                logger.exception("the front's thread failed")
                end = LaunchEnd(reason=f"{type(error).__name__}: {error}")
            if self._closing.is_set() or not self._settled.is_set():
                self._start_error = end.reason
                self._settled.set()
                return
            relaunches.note(end)
            if relaunches.are_given_up:
                self._lose(EngineState.DOWN, NOT_BACK, end.reason)
            elif not end.has_served:
                logger.warning("the ranks are not back yet: %s; %d requests wait", end.reason, len(self._journal))
            seconds = backoff.failed()
            self._wait_for_relaunch(None if relaunches.are_given_up and not self._keep_trying else seconds)
            if self._closing.is_set():
                return
            self._relaunch_asked.clear()
            logger.info("trying to bring the engine's ranks back")

    def _wait_for_relaunch(self, seconds: float | None) -> None:
        """Until so much time has passed, None = without end, or somebody asks for it."""
        end = None if seconds is None else time.monotonic() + seconds
        while not self._relaunch_asked.wait(None if end is None else min(max(end - time.monotonic(), 0), LOOK_SECONDS)):
            self._end_overdue()
            if end is not None and time.monotonic() >= end:
                return

    def _run_launch(self, backoff: Backoff) -> LaunchEnd:
        """Run one launch of the engine from start to end."""
        try:
            launch = self._open()
        except (OSError, ConfigurationError) as error:
            is_misconfigured = isinstance(error, ConfigurationError)
            return LaunchEnd(reason=f"the engine's ranks cannot be started: {error}", is_misconfigured=is_misconfigured)
        if launch is None:
            return LaunchEnd(reason=self._launcher.absent)
        watch = Watch(self._config)
        try:
            with contextlib.closing(EngineLink(launch.socket_path, self._hello())) as link:
                reason = self._pump(launch, link, watch, backoff)
                if self._closing.is_set():
                    self._leave(launch, link)
                elif watch.welcomed:
                    self._lose(EngineState.RELAUNCHING, RANKS_LOST, reason)
            return LaunchEnd(reason=reason, has_served=watch.welcomed, is_misconfigured=launch.is_misconfigured)
        finally:
            launch.end()

    def _hello(self) -> Hello:
        return Hello(
            front_id=self._ids.front_id,
            pid=os.getpid(),
            wants_iteration_stats=self._statistics.wants_iterations,
            wants_request_stats=self._statistics.wants_requests,
            wants_kv_cache_events=self._statistics.wants_events,
        )

    def _open(self) -> RunningLaunch | None:
        """The engine's next launch; None if none is found in time, or if this front is shut down."""
        deadline = time.monotonic() + self._config.worker_start_timeout_ms / 1000
        launch = self._launcher.open()
        while launch is None and time.monotonic() < deadline and not self._closing.wait(FIND_SECONDS):
            self._end_overdue()
            launch = self._launcher.open()
        return launch

    def _lose(self, state: EngineState, sentence: str, reason: str) -> None:
        num_ended = self._engine_lost(state, sentence)
        logger.error(
            "the engine is lost: %s; %d requests wait for ranks, %d were ended", reason, len(self._journal), num_ended
        )
        if self._on_engine_death is not None:
            self._on_engine_death(reason)

    def _leave(self, launch: RunningLaunch, link: EngineLink) -> None:
        self._engine_lost(EngineState.CLOSED, SHUT_DOWN)
        link.send(Shutdown() if self._launcher.owns_ranks else Goodbye())
        if not launch.wait_for_end(SHUTDOWN_SECONDS):
            logger.info("the ranks did not leave within %g s: killing them", SHUTDOWN_SECONDS)

    def _pump(self, launch: RunningLaunch, link: EngineLink, watch: Watch, backoff: Backoff) -> str:
        """Exchange messages until the engine ends or this front is shut down. Returns the reason."""
        poller = zmq.Poller()
        for source in (link.socket, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        while not self._closing.is_set():
            if not watch.welcomed:
                self._watch_all(launch, poller)
                self._end_overdue()
            ready = self._wait(poller, watch)
            for message in link.receive_all():
                watch.heard(message)
                if isinstance(message, Welcome):
                    backoff.succeeded()
                    launch.publish()
                    self._watch_all(launch, poller)
                if fatal := self._hear(message, link):
                    return fatal
            if reason := launch.end_reason(ready) or watch.overdue(has_joined=launch.has_joined):
                self._hear_last_words(link)
                return reason
            if watch.welcomed:
                self._send_all(link)
        return SHUT_DOWN

    @staticmethod
    def _watch_all(launch: RunningLaunch, poller: zmq.Poller) -> None:
        for fd in launch.fds():
            poller.register(fd, zmq.POLLIN)

    def _wait(self, poller: zmq.Poller, watch: Watch) -> set[object]:
        """Wait until a source is readable or a deadline must be checked. Returns the readable sources."""
        asked = watch.wait_seconds()
        before = time.monotonic()
        ready: set[object] = {source for source, _ in poller.poll(int(asked * 1000) + 1)}
        if time.monotonic() - before > asked + OVERSLEPT_SECONDS:
            watch.excuse()
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        return ready

    def _hear_last_words(self, link: EngineLink) -> None:
        """What the ranks sent before they ended may still be on its way through the socket's thread."""
        deadline = time.monotonic() + 10 * LAST_WORDS_MS / 1000
        while link.socket.poll(LAST_WORDS_MS) and time.monotonic() < deadline:
            for message in link.receive_all():
                self._hear(message, link)

    def _send_all(self, link: EngineLink) -> None:
        while self._outbox:
            request_id, frame = self._outbox.popleft()
            # A request that was cancelled during a relaunch has been answered already.
            if request_id in self._journal:
                link.send_encoded(frame)

    def _hear(self, message: FromLeader, link: EngineLink) -> str:
        """Handle a message of the leader. Returns why the engine ends, if the message says so, else an empty string."""
        if isinstance(message, Responses):
            self._deliver(message.responses)
        elif isinstance(message, Started):
            self._note_started(message.request_ids)
        elif isinstance(message, Stats):
            self._report_stats(message.json, message.num_queued)
        elif isinstance(message, Iterations):
            self._report_iterations(message.iteration_stats, message.request_stats)
        elif isinstance(message, KvCacheEvents):
            self._report_kv_cache_events(message.events)
        elif isinstance(message, Welcome):
            self._engine_ready(message.limits, message.description, message.max_in_flight)
            self._settled.set()
        elif isinstance(message, Occupied):
            with self._lock:
                self._ids.redraw_front()
            link.send(self._hello())
        elif isinstance(message, Fatal):
            return message.reason
        return ""
