"""The supervisor's side of the janitor: starts it, or finds the one of a server that has lost its supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from inflight.abandonment import Supervised
from inflight.backoff import Backoff
from inflight.errors import ConfigurationError
from inflight.supervisor import janitor
from inflight.supervisor.janitor import END, SOCKET, WELCOME
from inflight.supervisor.own_program import command_of, environment_of
from inflight.supervisor.process_id import ProcessId

JANITOR, SUPERVISOR = "janitor.pid", "supervisor.pid"
"""Files in the run directory that name these processes."""

ERRORS = "janitor.log"
"""In the run directory: what a janitor that fails has printed."""

PATIENCE = 30.0
"""Seconds within which a janitor answers, on a machine with other work."""


class JanitorProcess:
    """Owned by the supervisor's thread."""

    def __init__(
        self,
        run_directory: Path,
        prefix: str,
        *,
        adopt_timeout: float = 0.0,
        log_file: Path | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`prefix`: of the names of the server's shared-memory regions. `adopt_timeout`: seconds that a server which
        serves outlives its supervisor. `log_file`: where its log goes meanwhile. Not started yet."""
        self._run_directory, self._prefix, self._tell = run_directory, prefix, tell
        hello = {"adopt_timeout": adopt_timeout, "log_file": str(log_file.absolute()) if log_file else ""}
        self._hello = json.dumps(hello).encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lock: Supervised | None = None
        self._backoff, self._starts_at = Backoff(), 0.0

    def start(self) -> None:
        """Start one and wait until it attends to the server. Raises ConfigurationError if it does not."""
        self._hold_lock()
        (self._run_directory / SOCKET).unlink(missing_ok=True)
        errors = self._run_directory / ERRORS
        with self._socket() as listener, errors.open("wb") as printed:
            self._at_address(listener.bind)
            listener.listen()
            self._process = subprocess.Popen(
                command_of("inflight.supervisor.janitor", str(self._run_directory), self._prefix),
                env=environment_of(os.environ),
                stdin=listener.fileno(),
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )
        ProcessId.of(self._process.pid).write(self._run_directory / JANITOR)
        if not self._connect():
            lines = errors.read_text(errors="replace").splitlines() or ["it does not answer"]
            raise ConfigurationError(f"the process that cleans up after the server did not start: {lines[-1]}")

    def adopt(self) -> bool:
        """Supervise the server of a janitor that runs already. False if that one does not want it: the server is being
        ended, or has a supervisor."""
        return self._connect()

    def keep_up(self) -> None:
        """Start another one if it has ended. To be called about twice a second."""
        if self._connection is not None and not select.select([self._connection], [], [], 0)[0]:
            return
        self._disconnect()
        now = time.monotonic()
        if now < self._starts_at:
            return
        self._starts_at = now + self._backoff.failed()
        self._tell("the janitor ended; starting another one")
        try:
            self.start()
        except (ConfigurationError, OSError) as error:
            self._tell(str(error))
            return
        self._backoff.succeeded()

    def end(self) -> None:
        """When this returns, nothing of the server is left."""
        if self._connection is not None:
            self._connection.settimeout(PATIENCE)
            with contextlib.suppress(OSError):
                self._connection.sendall(END)
                self._connection.recv(1)  # its end
        self._disconnect()
        if self._run_directory.exists():
            janitor.sweep(self._run_directory, self._prefix)
            shutil.rmtree(self._run_directory, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Run a janitor for as long as the context lasts. When it ends, nothing of the server is left."""
        try:
            self.start()
            yield
        finally:
            self.end()

    def _connect(self) -> bool:
        connection = self._socket()
        connection.settimeout(PATIENCE)
        try:
            self._at_address(connection.connect)
            connection.sendall(self._hello)
            if connection.recv(len(WELCOME)) == WELCOME:
                connection.settimeout(None)
                self._connection = connection
                self._hold_lock()
                ProcessId.of(os.getpid()).write(self._run_directory / SUPERVISOR)
                return True
        except OSError:
            pass
        connection.close()
        return False

    def _hold_lock(self) -> None:
        if self._lock is None:
            self._lock = Supervised(self._run_directory, janitor.end_now(self._run_directory, self._prefix))

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _at_address(self, call: Callable[[str], object]) -> None:
        """Call with the socket's path, which must be short whatever the directory's is."""
        folder = os.open(self._run_directory, os.O_PATH)
        try:
            call(f"/proc/self/fd/{folder}/{SOCKET}")
        finally:
            os.close(folder)

    @staticmethod
    def _socket() -> socket.socket:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
