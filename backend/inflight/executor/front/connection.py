"""A front's connection to one replica of its engine: the launcher starts the ranks or finds them, the thread exchanges
messages with their leader, and when they are lost new ones are started or found.

One thread does all of it and owns the socket and the launcher. One launch (`RunningLaunch`) passes through

    open ── Welcome: send the journal ──> serve ── a process ends, or the heartbeat is overdue ──> lost: what is in
      ^                                                                   │ flight goes on elsewhere, or waits; end what
      └──────────────────────────────── after a pause ────────────────────┘ is left of the ranks

What is in flight waits through several tries to open a launch; `Relaunches` says for how long.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from inflight.backoff import Backoff
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.front.engine_state import EngineState
from inflight.executor.front.front import SHUT_DOWN
from inflight.executor.front.journal_entry import RANKS_LOST
from inflight.executor.front.link import EngineLink
from inflight.executor.front.relaunches import MAX_TRIES, LaunchEnd, Relaunches
from inflight.executor.front.watch import Watch
from inflight.executor.wire.launcher import FIND_SECONDS, Launcher, RunningLaunch
from inflight.executor.wire.messages import (
    Fatal,
    FromLeader,
    Goodbye,
    Heartbeat,
    Hello,
    Iterations,
    KvCacheEvents,
    Occupied,
    Received,
    Responses,
    Shutdown,
    Started,
    Stats,
    Welcome,
)

if TYPE_CHECKING:
    from inflight.executor.front.remote import RemoteFront

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 3.0
"""Time that the ranks have to end by themselves at a shutdown before they are killed."""
LOOK_SECONDS = 0.1
"""How often it is looked whether the time of a request has passed that waits for ranks."""
LAST_WORDS_MS = 20
"""For a message that the system has taken from ranks that ended meanwhile."""
OVERSLEPT_SECONDS = 1.0
"""If a wait exceeds its timeout by more than this, this process was suspended, and missed heartbeats prove nothing."""

NOT_BACK = "the engine's ranks could not be brought back"
REPLACED = "its ranks are being replaced"


class Connection:
    def __init__(
        self,
        front: RemoteFront,
        launcher: Launcher,
        config: EngineConfig,
        replica: int,
        *,
        keep_trying: bool,
        on_death: Callable[[str], None] | None,
    ) -> None:
        """Of `config` the timeouts are used. For the other arguments see RemoteFront."""
        self._front = front
        self._launcher = launcher
        self._config = config
        self._replica = replica
        self._keep_trying = keep_trying
        self._on_death = on_death
        self._outbox: deque[tuple[int, bytes]] = deque()
        """(request id, encoded message) of messages that are not sent yet."""
        self._wake_fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """None = the thread has ended, and nobody wakes it."""
        self._wake_lock = threading.Lock()
        """Without it, whoever wakes the thread might write to another file that has its number by then."""
        self._introduced_as = 0
        """The front id that the present leader was told."""
        self._has_served = False
        """Whether the ranks of the present launch do, or did before they were lost."""
        self._has_opened = threading.Event()
        """The first launch has been opened, or could not be."""
        self._closing = threading.Event()
        self._relaunch_asked = threading.Event()
        self._replacement_asked = threading.Event()
        name = f"inflight-front-{replica}" if replica else "inflight-front"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- from any thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def wait_until_open(self) -> None:
        """Until the processes of the first launch run, or it is known that they cannot be started."""
        self._has_opened.wait()

    def close(self) -> None:
        """Begin to leave the ranks, or to end those that belong to this front."""
        self._closing.set()
        self._relaunch_asked.set()
        self.wake()

    def join(self) -> None:
        """And give up what belongs to the thread, which `close` ends."""
        if self._thread.ident is not None:
            self._thread.join()
        with self._wake_lock:
            fd, self._wake_fd = self._wake_fd, None
        if fd is not None:
            os.close(fd)

    def relaunch(self) -> None:
        """Relaunch lost ranks now. Does nothing unless they are lost."""
        if self._state in (EngineState.RELAUNCHING, EngineState.DOWN):
            self._relaunch_asked.set()

    @property
    def num_spares(self) -> int:
        return self._launcher.num_spares

    def replace_ranks(self) -> None:
        """Launch others in place of ranks that serve. Does nothing unless they do."""
        if self._state is EngineState.READY:
            self._replacement_asked.set()
            self.wake()

    def pids(self) -> list[int]:
        """Ids of the running processes that the launcher started."""
        return self._launcher.pids()

    def send(self, request_id: int, frame: bytes) -> None:
        """Queue a message about a request for sending, unless the request ends before; 0 = about none in flight."""
        self._outbox.append((request_id, frame))
        self.wake()

    def drop_unsent(self) -> None:
        self._outbox.clear()

    def wake(self) -> None:
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    @property
    def _state(self) -> EngineState:
        return self._front._replicas.states()[self._replica]

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.closing(self._launcher):
            self._keep_serving()

    def _keep_serving(self) -> None:
        backoff, has_ever_served = Backoff(), False
        # What another process launches is only looked for, as often as there is time.
        max_tries = MAX_TRIES if self._launcher.owns_ranks else math.inf
        relaunches = Relaunches(self._config.worker_start_timeout_ms / 1000, max_tries)
        while True:
            try:
                end = self._run_launch(backoff)
            except Exception as error:
                logger.exception("the front's thread failed")
                end = LaunchEnd(reason=f"{type(error).__name__}: {error}", has_served=self._has_served)
            has_ever_served |= end.has_served
            if not has_ever_served:
                self._front.fail_start(end.reason, self._replica)
            if self._closing.is_set() or (not has_ever_served and self._launcher.owns_ranks):
                return
            relaunches.note(end)
            if has_ever_served and relaunches.are_given_up:
                # Requests that waited fail, since nobody knows when a relaunch will succeed.
                self._lose(EngineState.DOWN, NOT_BACK, end.reason)
            elif has_ever_served and not end.has_served:
                num_left = self._front.num_requests_in_flight()
                what = f"the ranks of {self._front.called}"
                logger.warning("%s are not back yet: %s; %d requests go on", what, end.reason, num_left)
            # Where ranks are only found, or wait, the next ones cost nothing.
            may_open_at_once = end.has_served and (self._launcher.num_spares or not self._launcher.owns_ranks)
            seconds = 0.0 if may_open_at_once else backoff.failed()
            # While another replica serves, nobody would ask for it.
            tries_again = self._keep_trying or not relaunches.are_given_up or not self._front.is_down()
            self._wait_for_relaunch(seconds if tries_again else None)
            if self._closing.is_set():
                return
            self._relaunch_asked.clear()
            logger.info("trying to bring back the ranks of %s", self._front.called)

    def _wait_for_relaunch(self, seconds: float | None) -> None:
        """Until so much time has passed, None = without end, or somebody asks for it."""
        end = None if seconds is None else time.monotonic() + seconds
        while not self._relaunch_asked.wait(None if end is None else min(max(end - time.monotonic(), 0), LOOK_SECONDS)):
            self._front._end_overdue()
            if end is not None and time.monotonic() >= end:
                return

    def _run_launch(self, backoff: Backoff) -> LaunchEnd:
        """Run one launch of the engine from start to end."""
        self._has_served = False
        try:
            launch = self._open()
        except (OSError, ConfigurationError) as error:
            is_misconfigured = isinstance(error, ConfigurationError)
            return LaunchEnd(reason=f"the engine's ranks cannot be started: {error}", is_misconfigured=is_misconfigured)
        finally:
            self._has_opened.set()
        if launch is None:
            return LaunchEnd(reason=self._launcher.absent)
        watch = Watch(self._config)
        try:
            with contextlib.closing(EngineLink(launch.socket_path, self._introduction())) as link:
                reason = self._pump(launch, link, watch, backoff)
                if self._closing.is_set():
                    self._leave(launch, link)
                elif reason == REPLACED:
                    self._replace(launch, link)
                elif self._has_served:
                    self._lose(EngineState.RELAUNCHING, RANKS_LOST, reason)
            return LaunchEnd(reason=reason, has_served=self._has_served, is_misconfigured=launch.is_misconfigured)
        except Exception as error:  # such as no descriptor for a process that is to be watched
            logger.exception("the front's thread failed")
            reason = f"{type(error).__name__}: {error}"
            if self._state is EngineState.READY:
                self._lose(EngineState.RELAUNCHING, RANKS_LOST, reason)
            return LaunchEnd(reason=reason, has_served=self._has_served)
        finally:
            launch.end()
            self._replacement_asked.clear()

    def _introduction(self) -> Hello:
        hello = self._front.hello()
        self._introduced_as = hello.front_id
        return hello

    def _open(self) -> RunningLaunch | None:
        """The engine's next launch; None if none is found in time, or if this front is shut down."""
        deadline = time.monotonic() + self._config.worker_start_timeout_ms / 1000
        launch = self._launcher.open()
        while launch is None and time.monotonic() < deadline and not self._closing.wait(FIND_SECONDS):
            self._front._end_overdue()
            launch = self._launcher.open()
        return launch

    def _lose(self, state: EngineState, sentence: str, reason: str) -> None:
        num_ended = self._front._replica_lost(state, sentence, self._replica)
        num_left = self._front.num_requests_in_flight()
        what = (f"replica {self._replica} of " if self._front.num_replicas > 1 else "") + self._front.called
        logger.error("%s is lost: %s; %d requests go on, %d were ended", what, reason, num_left, num_ended)
        if self._on_death is not None:
            self._on_death(reason)

    def _replace(self, launch: RunningLaunch, link: EngineLink) -> None:
        logger.info("the ranks of replica %d are being replaced", self._replica)
        self._front._replica_lost(EngineState.RELAUNCHING, RANKS_LOST, self._replica, planned=True)
        self._relaunch_asked.set()  # at once
        self._launcher.end_spares()
        self._end_ranks(launch, link)

    def _leave(self, launch: RunningLaunch, link: EngineLink) -> None:
        self._front._replica_lost(EngineState.CLOSED, SHUT_DOWN)
        if self._has_served or not self._launcher.starts_processes:
            self._end_ranks(launch, link)
        # Others load, and would hear nothing before they have: they are killed.

    def _end_ranks(self, launch: RunningLaunch, link: EngineLink) -> None:
        """Those of this front; the others it only leaves."""
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
                self._front._end_overdue()
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
                if self._replacement_asked.is_set():
                    return REPLACED
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
        if self._wake_fd is not None and self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        return ready

    def _hear_last_words(self, link: EngineLink) -> None:
        """What the ranks sent before they ended may still be on its way through the socket's thread."""
        deadline = time.monotonic() + 10 * LAST_WORDS_MS / 1000
        while link.socket.poll(LAST_WORDS_MS) and time.monotonic() < deadline:
            for message in link.receive_all():
                self._hear(message, link)

    def _send_all(self, link: EngineLink) -> None:
        if self._introduced_as != self._front.front_id:
            link.send(self._introduction())
        while self._outbox:
            request_id, frame = self._outbox.popleft()
            # A request that was cancelled while it waited for ranks has been answered already.
            if not request_id or self._front.is_in_flight(request_id):
                link.send_encoded(frame)

    def _hear(self, message: FromLeader, link: EngineLink) -> str:
        """Handle a message of the leader. Returns why the engine ends, if the message says so, else an empty string."""
        front, replica = self._front, self._replica
        if isinstance(message, Responses):
            front._deliver(message.responses)
            if message.to_be_confirmed:
                link.send(Received())
        elif isinstance(message, Started):
            front._note_started(message.request_ids)
        elif isinstance(message, Stats):
            front._report_stats(message.json, message.num_queued, replica)
        elif isinstance(message, Iterations):
            front._report_iterations(message.iteration_stats, message.request_stats, replica)
        elif isinstance(message, KvCacheEvents):
            front._report_kv_cache_events(message.events, replica)
        elif isinstance(message, Welcome):
            front._replica_ready(message.limits, message.description, message.max_in_flight, replica)
            self._has_served = True
        elif isinstance(message, Heartbeat):
            front._note_heartbeat(replica)
        elif isinstance(message, Occupied):
            front.redraw_id(self._introduced_as)
            link.send(self._introduction())
        elif isinstance(message, Fatal):
            return message.reason
        return ""
