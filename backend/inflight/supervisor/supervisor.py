"""The Supervisor: keeps one tritonserver serving until it is told to stop.

    STARTING ──ready──> SERVING <──adopted── a server that served, and whose supervisor was killed
        │                 │
        │ fails           ├── server or stub dead or hung, engine hung: started again; model unloaded: loaded again
        ▼                 │
     ConfigurationError   └──signal──> DRAINING ──idle or late, or a second signal──> STOPPED

tritonserver itself stays "ready" when a stub dies and never restarts one; at its end it waits for ever for a client
that keeps an idle stream open; and it leaves shared memory behind when it is killed. The supervisor handles all of
that. A server that was ready once is restarted until it is ready again, with backoff. Without tritonserver there is the
OpenAI server alone, of which `OpenAIProcess` takes care. Knows nothing of requests, tokens or ranks.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

from inflight.backoff import Backoff
from inflight.errors import ConfigurationError
from inflight.supervisor import janitor
from inflight.supervisor.janitor import SERVING
from inflight.supervisor.log import ServerLog
from inflight.supervisor.losses import Losses
from inflight.supervisor.metrics import requests_in_flight
from inflight.supervisor.openai_process import OpenAIProcess
from inflight.supervisor.plan import Plan
from inflight.supervisor.private_directory import explained
from inflight.supervisor.running_server import RunningServer
from inflight.supervisor.signals import Signals, Stopped
from inflight.supervisor.tritonserver import ended

TICK = 0.5
"""Seconds between two checks of the processes, so the delay until a killed stub is noticed. Costs 0.3 % of a core."""

START_TICK = 0.05
"""The same while a server starts, whose readiness is to be told at once."""

IDLE_GRACE = 1.0
"""Seconds that the engine must be idle before it counts as drained: metrics and last responses lag behind."""

EXIT_GRACE = 5.0
"""Seconds for tritonserver to exit by itself once drained. A client's idle open stream would keep it for ever."""


class Supervisor:
    """Owns the server's processes from `run` until it returns. One run per object, in the main thread."""

    def __init__(self, plan: Plan, tell: Callable[[str], None]) -> None:
        self._plan, self._tell = plan, tell
        self._losses = Losses(tell)
        self._log = ServerLog(tell, self._losses, verbose=plan.options.verbose, file=plan.options.log_file)
        self._signals = Signals()
        self._backoff = Backoff()
        self._running: RunningServer | None = None
        self._openai: OpenAIProcess | None = None
        if plan.options.openai is not None:
            log = None if plan.options.allow_tritonserver else self._log
            self._openai = OpenAIProcess(
                plan.run_directory, plan.endpoints.openai, plan.own_environment, tell, self._losses, log
            )
        self._serving = plan.run_directory / SERVING

    def run(self) -> None:
        """Serve until a signal. Raises ConfigurationError if the first start fails.

        Afterwards no process of the server is left, nor its shared memory.
        """
        with self._signals.listening(), self._cleaned_up():
            try:
                began = time.monotonic()
                if self._plan.is_adopted:
                    self._adopt()
                elif not self._start():
                    return
                how = "adopted" if self._plan.is_adopted else f"ready after {time.monotonic() - began:.1f} s"
                self._tell(f"{how}; run directory {self._plan.run_directory}")
                self._announce()
                self._keep_serving()
                self._drain()
            except Stopped:
                self._tell("stopping at once")

    # Starting

    def _adopt(self) -> None:
        """Take the place of the supervisor that was killed. What has ended since is found by the next looks."""
        if self._plan.options.allow_tritonserver:
            self._running = RunningServer(self._plan, self._log, self._tell, is_adopted=True)
        if self._openai is not None:
            self._openai.adopt()
        self._backoff.succeeded()
        self._log.tell_errors()

    def _start(self) -> bool:
        """Start and wait until ready; False if a signal came first."""
        if self._plan.options.allow_tritonserver:
            self._running = RunningServer(self._plan, self._log, self._tell)
        if self._openai is not None:
            self._openai.start()
        timeout = self._plan.options.ready_timeout
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._running is not None and self._running.process.returncode is not None:
                raise ConfigurationError(self._start_failure())
            openai_is_ready = self._openai is None or self._openai.is_ready()
            if openai_is_ready and (self._running is None or self._running.is_ready()):
                if not self._load_attached(tuple(self._plan.repository.attached)):
                    return False
                self._backoff.succeeded()
                self._log.tell_errors()
                with contextlib.suppress(OSError):  # on a full disk: then nobody adopts it
                    self._serving.touch()
                return True
            if self._signals.wait(START_TICK):
                return False
        waited = f"{self._plan.name} was not ready within {timeout:.0f} s"
        raise ConfigurationError(f"{waited}: raise --ready-timeout, or see its log with --verbose")

    def _load_attached(self, models: tuple[str, ...]) -> bool:
        """Load dialect models, side by side, whose engines serve; False at a signal. Raises ConfigurationError with the
        reason if one cannot be loaded."""
        loadings = {model: self._server.load(model) for model in models}
        for model, loading in loadings.items():
            while not loading.is_over:
                if self._signals.wait(0.1):
                    return False
            if loading.failure:
                raise ConfigurationError(f"model {model} was not loaded: {loading.failure}")
        return True

    def _start_failure(self) -> str:
        self._log.join(5.0)
        log = self._log
        reason = log.bad_option() or log.load_failure() or log.last_error() or "no reason in its log"
        how = ended(self._server.process.returncode)
        return f"tritonserver did not start ({how}): {reason} (--verbose shows its log)"

    def _announce(self) -> None:
        on_ready = self._plan.options.on_ready
        if on_ready is not None:
            threading.Thread(target=on_ready, args=(self._plan.endpoints,), name="on-ready", daemon=True).start()

    # Serving

    def _keep_serving(self) -> None:
        """Watch the server, and restart it or load its models again as needed. Returns at a signal."""
        while not self._signals.wait(TICK):
            self._plan.janitor.keep_up()
            self._losses.tell_settled()
            if self._openai is not None:
                self._openai.keep_up()
            if self._running is None:
                continue
            if (failure := self._server.failure()) and not self._restart(failure):
                return
            for model, reason in self._server.models_down():
                if not self._load_again(model, reason):
                    return

    def _restart(self, failure: str) -> bool:
        """Kill what is left and start again; False at a signal. Clients get an error: tritonserver's because their
        connections end, and those of the OpenAI server, which stays and finds the new engine, in words."""
        spares_openai = True  # if that start fails, it may be the reason
        while True:
            self._kill(spares_openai=spares_openai)
            spares_openai = False
            if self._pause(f"{failure}; starting it again"):
                return False
            try:
                started = self._start()
            except ConfigurationError as error:
                failure = str(error)
                continue
            if started:
                self._tell("serving again")
            return started

    def _load_again(self, model: str, reason: str) -> bool:
        """Try to load the model until it is ready; False at a signal. Leaves a failed server to the next check.

        Dialect models come and go with their engine, so that none is ready without it."""
        engine = self._plan.repository.attached.get(model)
        attached = self._plan.repository.attached_to(model)
        with contextlib.suppress(OSError):
            if engine is not None and not self._server.admin.is_model_ready(engine):
                return True
            for dialect in attached:
                self._server.admin.unload(dialect)
        while True:
            if self._pause(f"model {model} went down ({reason}); loading it again"):
                return False
            loading = self._server.load(model)
            while not loading.is_over:
                if self._signals.wait(0.1):
                    return False
                if self._server.failure():
                    return True
            reason = loading.failure
            if not reason:
                self._backoff.succeeded()
                self._tell(f"model {model} serves again")
                try:
                    return self._load_attached(attached)
                except ConfigurationError as error:
                    # The next looks find that it is down.
                    self._tell(str(error))
            if not reason or self._server.failure():
                return True

    def _pause(self, what: str) -> bool:
        """Report what failed and what follows, and wait for the backoff. True at a signal."""
        seconds = self._backoff.failed()
        self._tell(what + (f" in {seconds:.0f} s" if seconds else ""))
        return self._signals.wait(seconds)

    # Stopping

    def _drain(self) -> None:
        """Refuse new requests, wait for those in flight, then end the server."""
        self._serving.unlink(missing_ok=True)
        timeout = self._plan.options.drain_timeout
        self._tell(f"stopping: requests in flight have {timeout:.0f} s to finish; a second signal stops at once")
        deadline = time.monotonic() + timeout
        if self._openai is not None:
            # Before the engine is unloaded: tritonserver does not know of these requests.
            self._openai.drain(deadline, self._signals.wait)
        if self._running is None:
            return
        # Dialect models first: with its model an engine ends, whoever still waits for it.
        waves = [tuple(self._plan.repository.attached), tuple(reversed(self._plan.repository.models))]
        with contextlib.suppress(OSError):
            for models in filter(None, waves):
                for model in models:
                    self._server.admin.unload(model)
                if not self._idle(models, deadline):
                    self._tell("requests in flight did not finish in time")
                    break
        process = self._server.process
        self._log.hush_errors()
        process.terminate()
        deadline = time.monotonic() + EXIT_GRACE
        while process.returncode is None and time.monotonic() < deadline:
            self._signals.wait(0.05)

    def _idle(self, models: tuple[str, ...], deadline: float) -> bool:
        """Wait until the unloaded `models` have no request in flight; False at the deadline. Raises OSError if the
        server does not answer."""
        idle_since = math.inf
        while (now := time.monotonic()) < deadline:
            states = self._server.admin.states()
            if not any(states.get(model, set()) & {"UNLOADING", "READY", "LOADING"} for model in models):
                return True
            idle = requests_in_flight(self._plan.endpoints.metrics) == 0
            idle_since = min(idle_since, now) if idle else math.inf
            if now - idle_since >= IDLE_GRACE:
                return True
            self._signals.wait(0.1)
        return False

    @contextlib.contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """When the context ends, nothing of the server is left, whichever of its processes died before."""
        try:
            if not self._plan.is_adopted:
                with explained(self._plan.run_directory):
                    self._plan.janitor.start()
                    self._plan.record.write(self._plan.run_directory)
            yield
        finally:
            self._kill()
            self._plan.janitor.end()

    def _kill(self, *, spares_openai: bool = False) -> None:
        """End the server's every process at once and remove its shared memory."""
        self._serving.unlink(missing_ok=True)
        self._log.hush_errors()
        if self._openai is not None and not spares_openai:
            self._openai.kill()
        if self._running is not None:
            self._running.process.kill()
            spared = {self._openai.pid} if self._openai is not None else set()
            janitor.sweep(self._plan.run_directory, self._plan.record.prefix, grace=1.0, spared=spared)
            self._running.process.wait(5.0)
            self._running.close()
            self._log.join(1.0)

    @property
    def _server(self) -> RunningServer:
        assert self._running is not None, "the server was never started"
        return self._running
