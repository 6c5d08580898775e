"""The Supervisor: keeps one tritonserver serving until it is told to stop.

    STARTING ──ready──> SERVING ──signal──> DRAINING ──idle or late──> STOPPED
        │                 │  ▲                 │
        │ fails           │  └── restarted ────┤ second signal: at once
        ▼                 ▼                    ▼
     ConfigurationError  server or stub dead, models lost: started or loaded again, with a bound and growing pauses

tritonserver itself stays "ready" when a stub dies and never restarts one; it waits for ever on a client that keeps
an idle stream open; and it leaves shared memory behind when it is killed. All that is mended here. Knows nothing of
requests, tokens or ranks, except that a model which lost its ranks says so by a file (see `_lost_models`).
"""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from inflight.errors import ConfigurationError, InflightError
from inflight.run_directory import LOST, SIGNS
from inflight.supervisor import janitor
from inflight.supervisor.admin import Admin
from inflight.supervisor.in_flight import requests_in_flight
from inflight.supervisor.log import ServerLog
from inflight.supervisor.plan import Plan
from inflight.supervisor.stub_signs import StubSigns
from inflight.supervisor.tritonserver import Tritonserver

TICK = 0.5
"""Seconds between two looks at the processes: what a killed stub costs in detection, and 0.3 % of a core."""

LIVE_PERIOD, LIVE_STRIKES = 5.0, 3
"""A server that answers no health check that often in a row, this many seconds apart, counts as hung."""

IDLE_GRACE = 1.0
"""Seconds that the engine must have been idle: its gauges and its last responses lag behind it."""

EXIT_GRACE = 5.0
"""Seconds for tritonserver to exit by itself once drained; a client's idle open stream can hold it for ever."""

STEADY = 60.0
"""Seconds of serving after which earlier failures are forgiven."""


class ServerLost(InflightError):
    """The server ended, hung or lost its models more often than it may be restarted."""


class Stopped(Exception):
    """A signal asked for an immediate end."""


class Supervisor:
    """Owns the server's processes from `run` until it returns. One run per object, in the main thread."""

    def __init__(self, plan: Plan, tell: Callable[[str], None]) -> None:
        self._plan, self._tell = plan, tell
        self._admin = Admin(plan.connect_host, plan.http_port)
        self._log = ServerLog(tell, verbose=plan.options.verbose, file=plan.options.log_file)
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._signals_seen = 0
        self._stub_signs = StubSigns(plan.run_directory / SIGNS)
        self._server: Tritonserver | None = None
        self._failures = 0
        self._served_since = time.monotonic()
        self._next_live_check, self._strikes = 0.0, 0

    def run(self) -> None:
        """Serve until a signal. Raises ConfigurationError if the first start fails, ServerLost if it cannot be kept up.

        Afterwards no process of the server is left, nor its shared memory.
        """
        with self._listening(), self._cleaned_up():
            try:
                began = time.monotonic()
                if self._start():
                    self._tell(f"ready after {time.monotonic() - began:.1f} s")
                    self._announce()
                    self._keep_serving()
                    self._drain()
            except Stopped:
                self._tell("stopping at once")

    # Starting

    def _start(self) -> bool:
        """Start and wait until ready; False if a signal came first."""
        plan = self._plan
        (plan.run_directory / LOST).mkdir(exist_ok=True)
        for marker in (plan.run_directory / LOST).iterdir():
            marker.unlink()
        self._server = Tritonserver(plan.command, plan.environment, plan.run_directory)
        self._log.follow(self._server.output)
        deadline = time.monotonic() + plan.options.ready_timeout
        while time.monotonic() < deadline:
            if self._server.returncode is not None:
                raise ConfigurationError(self._start_failure())
            with contextlib.suppress(OSError):
                if self._admin.is_ready():
                    self._served_since = time.monotonic()
                    self._strikes = 0
                    self._log.tell_errors()
                    return True
            if self._wait(0.1):
                return False
        waited = f"tritonserver was not ready within {plan.options.ready_timeout:.0f} s"
        raise ConfigurationError(f"{waited}: --ready-timeout gives it longer, --verbose shows its log")

    def _start_failure(self) -> str:
        self._log.join(5.0)
        assert self._server is not None
        reason = self._log.load_failure() or self._log.last_error() or "no reason in its log"
        return f"tritonserver did not start ({_ended(self._server.returncode)}): {reason} (--verbose shows its log)"

    def _announce(self) -> None:
        on_ready = self._plan.options.on_ready
        if on_ready is not None:
            threading.Thread(target=on_ready, args=(self._plan.endpoints,), name="on-ready", daemon=True).start()

    # Serving

    def _keep_serving(self) -> None:
        """Returns at a signal."""
        while not self._wait(TICK):
            if (failure := self._server_failure()) and not self._restart(failure):
                return
            for model, reason in self._lost_models():
                if not self._load_again(model, reason):
                    return

    def _server_failure(self) -> str:
        """What is wrong with the server as a whole; "" if nothing."""
        assert self._server is not None
        if self._server.returncode is not None:
            return f"tritonserver ended ({_ended(self._server.returncode)})"
        if stub := self._server.killed_stub():
            return f"the stub process {stub} ended"
        if stub := self._stub_signs.silent_stub(time.monotonic()):
            return f"the stub process {stub} stands still"
        return self._hang()

    def _hang(self) -> str:
        now = time.monotonic()
        if now < self._next_live_check:
            return ""
        self._next_live_check = now + LIVE_PERIOD
        try:
            self._admin.is_live()
            self._strikes = 0
        except OSError:
            self._strikes += 1
        return "tritonserver does not answer" if self._strikes >= LIVE_STRIKES else ""

    def _restart(self, failure: str) -> bool:
        """Kill what is left and start again; False at a signal. Clients see their connection end, which is an error."""
        while True:
            self._kill()
            pause = self._pause(failure)
            self._tell(f"{failure}; starting it again" + (f" in {pause:.0f} s" if pause else ""))
            if self._wait(pause):
                return False
            try:
                started = self._start()
            except ConfigurationError as error:
                failure = str(error)
                continue
            if started:
                self._tell("serving again")
            return started

    def _lost_models(self) -> Iterator[tuple[str, str]]:
        """Models whose stub gave them up, with its reason: it leaves a file of the model's name, then unloads it."""
        for marker in sorted((self._plan.run_directory / LOST).iterdir()):
            if marker.name in self._plan.repository.models:
                reason = marker.read_text(encoding="utf-8", errors="replace").strip()
                marker.unlink()
                yield marker.name, reason or "it gave no reason"

    def _load_again(self, model: str, reason: str) -> bool:
        """Load until it serves; False at a signal. Leaves a dead server to the next look at it."""
        while True:
            pause = self._pause(f"model {model}: {reason}")
            self._tell(
                f"model {model} went down ({reason}); loading it again" + (f" in {pause:.0f} s" if pause else "")
            )
            if self._wait(pause):
                return False
            outcome: queue.SimpleQueue[str] = queue.SimpleQueue()
            threading.Thread(target=self._load, args=(model, outcome), name="load-model", daemon=True).start()
            while outcome.empty():
                if self._wait(0.1):
                    return False
            reason = outcome.get()
            if not reason:
                self._tell(f"model {model} serves again")
            if not reason or self._server_failure():
                return True

    def _load(self, model: str, outcome: queue.SimpleQueue[str]) -> None:
        """Once the stub's unload has taken hold: a load before it would change nothing."""
        try:
            deadline = time.monotonic() + EXIT_GRACE
            while self._admin.is_model_ready(model) and time.monotonic() < deadline:
                time.sleep(0.05)
            outcome.put(self._admin.load(model, timeout=self._plan.options.ready_timeout))
        except OSError as error:
            outcome.put(str(error))

    def _pause(self, failure: str) -> float:
        """Count a failure; the seconds to wait before the next try: none, then 1, 2, 4, … up to 30."""
        now = time.monotonic()
        if now - self._served_since > STEADY:
            self._failures = 0
        self._served_since = now
        self._failures += 1
        if self._failures > self._plan.options.max_restarts:
            raise ServerLost(f"{failure}; given up after {self._plan.options.max_restarts} tries")
        return 0.0 if self._failures == 1 else min(2.0 ** (self._failures - 2), 30.0)

    # Stopping

    def _drain(self) -> None:
        """Refuse new requests, wait for those under way, then end the server."""
        options = self._plan.options
        self._tell(f"stopping: open requests have {options.drain_timeout:.0f} s; a second signal stops at once")
        deadline = time.monotonic() + options.drain_timeout
        models = tuple(reversed(self._plan.repository.models))
        with contextlib.suppress(OSError):
            for model in models:
                self._admin.unload(model)
            if not self._idle(models, deadline):
                self._tell("open requests did not end in time")
        assert self._server is not None
        self._server.terminate()
        deadline = time.monotonic() + EXIT_GRACE
        while self._server.returncode is None and time.monotonic() < deadline:
            self._wait(0.05)

    def _idle(self, models: tuple[str, ...], deadline: float) -> bool:
        """Wait until unloaded `models` have no request under way; False at the deadline. OSError: no server."""
        idle_since = math.inf
        while (now := time.monotonic()) < deadline:
            states = {state.name: state.state for state in self._admin.index()}
            if all(states.get(model) not in ("UNLOADING", "READY", "LOADING") for model in models):
                return True
            idle = requests_in_flight(self._plan.endpoints.metrics) == 0
            idle_since = min(idle_since, now) if idle else math.inf
            if now - idle_since >= IDLE_GRACE:
                return True
            self._wait(0.1)
        return False

    @contextlib.contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """A janitor stands by for as long as there can be something to clean, and has cleaned when this ends."""
        program = [sys.executable, "-m", janitor.__name__, str(self._plan.run_directory), self._plan.prefix]
        attendant = subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True)
        try:
            yield
        finally:
            self._kill()
            attendant.communicate()

    def _kill(self) -> None:
        """End the server's every process at once and remove its shared memory."""
        if self._server is not None:
            self._server.kill()
            janitor.sweep(self._plan.run_directory, self._plan.prefix, grace=1.0)
            self._server.wait(5.0)
            self._log.join(1.0)

    # Signals

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.put(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _wait(self, timeout: float) -> bool:
        """Sleep, or wake at a signal. True once one has come; the second raises Stopped."""
        with contextlib.suppress(queue.Empty):
            self._signals.get(timeout=timeout) if timeout else self._signals.get_nowait()
            self._signals_seen += 1
        if self._signals_seen > 1:
            raise Stopped
        return self._signals_seen == 1


def _ended(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal.Signals(-returncode).name}"
