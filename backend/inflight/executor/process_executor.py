"""An executor whose ranks are processes of their own: it launches them, watches them, ends them and launches them anew.

One thread does all of it and owns the socket. A launch passes through

    start ── Welcome ──> serve ── a process ends, or the heartbeat is overdue ──> dead: fail what is in flight,
      ^                                                                             kill all that is left
      └──────────────────────────── after a pause, a bounded number of times ─────────┘

How the ranks are started is all that a subclass says.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping

import zmq

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError, InvalidRequest
from inflight.executor.engine_link import EngineLink
from inflight.executor.front_executor import CLOSED, LOST, EngineState, FrontExecutor
from inflight.executor.launch import Launch
from inflight.executor.messages import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Fatal,
    FromLeader,
    Heartbeat,
    Responses,
    Shutdown,
    Stats,
    Submit,
    Welcome,
    encode,
)
from inflight.executor.rank_processes import RankProcesses
from inflight.generation_defaults import GenerationDefaults
from inflight.request import Request

logger = logging.getLogger(__name__)

MAX_RELAUNCHES = 5
"""In a row; an engine that then served for STABLE_SECONDS starts the count anew."""
STABLE_SECONDS = 300.0
PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each relaunch in a row."""
JOIN_SECONDS = 60.0
"""The ranks must have found each other so long after their launch; loading may take longer."""
SHUTDOWN_SECONDS = 3.0
"""For the ranks to leave in good order."""
OVERSLEPT_SECONDS = 1.0
"""A wait that took so much longer than asked means that this process, not the engine, stood still."""


class ProcessExecutor(FrontExecutor):
    """Subclasses give `_command`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        auto_relaunch: bool = True,
        on_engine_death: Callable[[str], None] | None = None,
    ) -> None:
        """`auto_relaunch`: False leaves dead ranks to a call of relaunch(). `on_engine_death(reason)` is called on the
        executor's thread after every request in flight was failed; it must not wait. Raises ConfigurationError for a
        wrong generation_config.json."""
        super().__init__(GenerationDefaults.load(config))
        self._config = config
        self._auto_relaunch = auto_relaunch
        self._on_engine_death = on_engine_death
        self._outbox: deque[bytes] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._settled = threading.Event()  # the first launch has come to an end, good or bad
        self._start_error: str | None = None
        self._closing = threading.Event()
        self._relaunch_asked = threading.Event()
        self._processes: RankProcesses | None = None
        self._thread = threading.Thread(target=self._run, name="inflight-engine", daemon=True)

    # -- Executor ------------------------------------------------------------------------------------------------------

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
        self._engine_gone(EngineState.CLOSED, CLOSED)
        atexit.unregister(self.shutdown)

    def relaunch(self) -> None:
        """Launch dead ranks again, now and whatever happened before. Does nothing while they live."""
        if self._state is EngineState.DOWN:
            self._relaunch_asked.set()

    def engine_pids(self) -> list[int]:
        """Every living process of the engine on this machine."""
        processes = self._processes
        return processes.pids() if processes is not None else []

    @abstractmethod
    def _command(self, launch: Launch) -> tuple[list[str], Mapping[str, str]]:
        """Command line and environment that start all ranks. Raises ConfigurationError."""

    def _explain(self, reason: str) -> str:
        """What to say when the ranks ended before they found each other; `reason` says how they ended."""
        return f"the engine's ranks did not start: {reason}"

    # -- FrontExecutor -------------------------------------------------------------------------------------------------

    def _encode(self, request: Request) -> object:
        frame = encode(Submit([request]))
        if len(frame) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(f"the request is larger than {MAX_MESSAGE_BYTES} bytes")
        return frame

    def _send_request(self, encoded: object) -> None:
        assert isinstance(encoded, bytes)
        self._outbox.append(encoded)

    def _send_cancel(self, request_id: int) -> None:
        self._outbox.append(encode(Cancel([request_id])))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        num_relaunches = 0
        while True:
            started = time.monotonic()
            try:
                reason = self._live_once()
            except Exception as error:
                logger.exception("the executor's thread failed")
                reason = f"{type(error).__name__}: {error}"
            if self._closing.is_set() or not self._settled.is_set():
                self._start_error = reason
                self._settled.set()
                return
            num_relaunches = 0 if time.monotonic() - started > STABLE_SECONDS else num_relaunches
            self._pause(num_relaunches)
            if self._closing.is_set():
                return
            num_relaunches += 1
            logger.info("launching the ranks again (%d)", num_relaunches)

    def _pause(self, num_relaunches: int) -> None:
        """Until it is time to relaunch, or somebody asks for it."""
        if not self._auto_relaunch or num_relaunches >= MAX_RELAUNCHES:
            logger.error("the ranks are not launched again until it is asked for; a supervisor loads the model again")
            self._relaunch_asked.wait()
        else:
            self._relaunch_asked.wait(PAUSES[min(num_relaunches, len(PAUSES) - 1)])
        if not self._closing.is_set():
            self._relaunch_asked.clear()

    def _live_once(self) -> str:
        """One launch, from start to end. Returns why it ended."""
        try:
            self._processes = RankProcesses(self._config, self._command)
        except (OSError, ConfigurationError) as error:
            return f"the engine's ranks cannot be started: {error}"
        try:
            with contextlib.closing(EngineLink(self._processes.launch.socket_path)) as link:
                reason = self._pump(self._processes, link)
                if self._closing.is_set():
                    self._leave(self._processes, link)
                else:
                    self._bury(reason)
        finally:
            self._engine_gone(EngineState.CLOSED if self._closing.is_set() else EngineState.DOWN, LOST)
            self._processes.kill()
            self._outbox.clear()
        return reason

    def _bury(self, reason: str) -> None:
        num_lost = self._engine_gone(EngineState.DOWN, LOST)
        logger.error("the engine is down, %d requests in flight were failed: %s", num_lost, reason)
        if self._on_engine_death is not None and self._settled.is_set():
            self._on_engine_death(reason)

    def _leave(self, processes: RankProcesses, link: EngineLink) -> None:
        self._engine_gone(EngineState.CLOSED, CLOSED)
        link.send(Shutdown())
        if not processes.wait(SHUTDOWN_SECONDS):
            logger.info("the ranks did not leave within %g s: killing them", SHUTDOWN_SECONDS)

    def _pump(self, processes: RankProcesses, link: EngineLink) -> str:
        """Carry messages both ways until the engine ends or this executor closes. Returns the reason."""
        poller = zmq.Poller()
        for source in (link.socket, self._wake_fd, *processes.pidfds):
            poller.register(source, zmq.POLLIN)
        watch = _Watch(self._config)
        while not self._closing.is_set():
            ready = self._wait(poller, watch)
            for message in link.receive_all():
                watch.heard(message)
                if fatal := self._hear(message):
                    return fatal
                if isinstance(message, Welcome):
                    processes.watch_ranks()
                    for pidfd in processes.pidfds:
                        poller.register(pidfd, zmq.POLLIN)
            if reason := self._why_over(processes, watch, ready):
                return reason
            if watch.welcomed:
                while self._outbox:
                    link.send_encoded(self._outbox.popleft())
        return CLOSED

    def _wait(self, poller: zmq.Poller, watch: _Watch) -> set[object]:
        """For something to do, or to look at the clock. Returns what is ready."""
        asked = watch.wait_seconds()
        before = time.monotonic()
        ready: set[object] = {source for source, _ in poller.poll(int(asked * 1000) + 1)}
        if time.monotonic() - before > asked + OVERSLEPT_SECONDS:
            watch.excuse()
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        return ready

    def _why_over(self, processes: RankProcesses, watch: _Watch, ready: set[object]) -> str:
        """A sentence if this launch has come to its end."""
        launch = processes.launch
        failure = "" if watch.welcomed else launch.failure()
        ended = [pidfd for pidfd in processes.pidfds if pidfd in ready]
        if ended and not failure:
            why = processes.why_ended(ended[0])
            return why if launch.failure() or launch.rank_pids() else self._explain(why)
        return failure or watch.overdue(joined=watch.welcomed or bool(launch.rank_pids()))

    def _hear(self, message: FromLeader) -> str:
        """Returns why the engine ends, if the message says so."""
        if isinstance(message, Responses):
            self._deliver(message.responses)
        elif isinstance(message, Stats):
            self._report_stats(message.json, message.num_queued)
        elif isinstance(message, Welcome):
            self._engine_ready(message.limits, message.device, message.front_id, message.max_in_flight)
            self._settled.set()
        elif isinstance(message, Fatal):
            return message.reason
        return ""


class _Watch:
    """Deadlines of one launch."""

    def __init__(self, config: EngineConfig) -> None:
        self.welcomed = False
        self._launched = self._last_sign = time.monotonic()
        self._start_seconds = config.worker_start_timeout_ms / 1000
        self._join_seconds = min(JOIN_SECONDS, self._start_seconds)
        self._heartbeat_seconds = config.worker_heartbeat_timeout_ms / 1000

    def wait_seconds(self) -> float:
        """How long to wait at most before asking for what is overdue."""
        return self._heartbeat_seconds / 10 if self.welcomed else 0.1

    def heard(self, message: FromLeader) -> None:
        if isinstance(message, Welcome):
            self.welcomed = True
        if isinstance(message, Welcome | Heartbeat):
            self._last_sign = time.monotonic()

    def excuse(self) -> None:
        """Nobody could have been heard: start to wait anew."""
        self._last_sign = time.monotonic()

    def overdue(self, joined: bool) -> str:
        """What should have happened by now and has not; empty if nothing."""
        now = time.monotonic()
        if self.welcomed:
            silent = now - self._last_sign
            late = silent > self._heartbeat_seconds
            return f"the ranks were silent for {silent:.1f} s (worker_heartbeat_timeout_ms)" if late else ""
        if now - self._launched > self._start_seconds:
            return f"the engine was not ready within worker_start_timeout_ms ({self._start_seconds * 1000:.0f})"
        if not joined and now - self._launched > self._join_seconds:
            return f"the engine's ranks did not find each other within {self._join_seconds:.0f} s"
        return ""
