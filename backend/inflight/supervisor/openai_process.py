"""The process of the OpenAI server: started with tritonserver or alone, started again whenever it ends or hangs.

It attaches to the ranks by itself, also after they or tritonserver were started again; without tritonserver it launches
them, and they end with it. Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from inflight.backoff import Backoff
from inflight.errors import ConfigurationError
from inflight.supervisor import output_pipe
from inflight.supervisor.adopted_process import AdoptedProcess
from inflight.supervisor.health import PERIOD, STRIKES, TIMEOUT
from inflight.supervisor.log import ServerLog
from inflight.supervisor.losses import Losses
from inflight.supervisor.output_pipe import OutputPipe
from inflight.supervisor.own_program import command_of, environment_of
from inflight.supervisor.process_id import ProcessId
from inflight.supervisor.tritonserver import ended

MODULE = "inflight.http"

OPTIONS_FILE = "openai.json"
"""In the run directory: the options of the OpenAI server."""

PROCESS_FILE = "openai.pid"
"""In the run directory: names the process."""


class OpenAIProcess:
    """Owned by the supervisor's thread."""

    def __init__(
        self,
        run_directory: Path,
        address: str,
        environment: Mapping[str, str],
        tell: Callable[[str], None],
        losses: Losses,
        log: ServerLog | None = None,
    ) -> None:
        """`address`: host:port at which it will listen. `log`: reads what it prints; None = all of that is shown, but
        for what `losses` tells. Not started yet."""
        self._command = command_of(MODULE, str(run_directory / OPTIONS_FILE))
        self._file = run_directory / PROCESS_FILE
        self._pipe = OutputPipe(run_directory, output_pipe.OPENAI)
        self._copying: threading.Thread | None = None
        self._address, self._environment, self._tell = address, environment_of(environment), tell
        self._losses, self._log = losses, log
        self._backoff = Backoff()
        self._process: subprocess.Popen[bytes] | AdoptedProcess | None = None
        self._starts_at = 0.0
        self._next_look = 0.0
        self._strikes = 0
        self._has_answered = False
        """Since its start. Until the engine is there it does not listen."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Unless it runs: it outlives tritonserver, and finds the next engine by itself."""
        if self._process is not None and self._process.poll() is None:
            return
        reader = self._pipe.open_reader()
        with open(self._pipe.open_writer(), "wb") as printed:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )
        ProcessId.of(self._process.pid).write(self._file)
        self._copy_output(reader)
        self._strikes, self._has_answered = 0, False

    def adopt(self) -> None:
        """Watch the one that an earlier supervisor has started."""
        self._process = AdoptedProcess(self._file)
        self._copy_output(self._pipe.open_reader())

    def is_ready(self) -> bool:
        """Whether it serves an engine that is ready. Raises ConfigurationError if it has ended: it said why."""
        if self._process is not None and self._process.poll() is not None:
            how = ended(self._process.poll())
            self._join()
            raise ConfigurationError(f"the OpenAI server did not start ({how}): the line above says why")
        try:
            return _health(self._address) == http.client.OK
        except OSError:
            return False

    def keep_up(self) -> None:
        """Start it again if it has ended or hangs, after a pause that grows. To be called about twice a second."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._starts_at:
                self.start()
            return
        failure = self._failure(now)
        if failure:
            self.kill()
            seconds = self._backoff.failed()
            self._starts_at = now + seconds
            self._tell(f"{failure}; starting it again" + (f" in {seconds:.0f} s" if seconds else ""))

    def drain(self, deadline: float, wait: Callable[[float], object]) -> None:
        """Let requests in flight finish until `deadline`, on the monotonic clock. `wait(seconds)` sleeps."""
        if self._process is None:
            return
        self._process.terminate()
        while self._process.poll() is None and time.monotonic() < deadline:
            wait(0.05)
        self.kill()

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._join()

    def _copy_output(self, reader: int) -> None:
        if self._log is not None:
            self._log.follow(os.fdopen(reader, errors="replace"))
            return
        self._copying = threading.Thread(target=self._copy, args=(reader,), name="openai-output", daemon=True)
        self._copying.start()

    def _join(self) -> None:
        """Wait until the last that it has printed is shown."""
        if self._log is not None:
            self._log.join(1.0)
        if self._copying is not None:
            self._copying.join(1.0)

    def _copy(self, reader: int) -> None:
        """To standard error, until the process has ended. If that is closed, read on: a full pipe blocks a process."""
        with open(reader, errors="replace") as output:
            for line in output:
                if not self._losses.note(line.rstrip("\n")):
                    with contextlib.suppress(OSError):
                        os.write(2, line.encode())

    def _failure(self, now: float) -> str:
        """What is wrong with it; "" if nothing."""
        assert self._process is not None
        if self._process.poll() is not None:
            return f"the OpenAI server ended ({ended(self._process.poll())})"
        if now < self._next_look:
            return ""
        self._next_look = now + PERIOD
        try:
            _health(self._address)
        except OSError:
            self._strikes += self._has_answered
            return "the OpenAI server does not answer" if self._strikes >= STRIKES else ""
        if not self._has_answered:
            self._backoff.succeeded()
            if self._log is not None:
                self._log.tell_errors()
        self._strikes, self._has_answered = 0, True
        return ""


def _health(address: str) -> int:
    """The status of /health. Raises OSError if there is no answer."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except http.client.HTTPException as error:
        raise OSError(f"{address}: {error}") from error
    finally:
        connection.close()
