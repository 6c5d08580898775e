"""Stays beside a server for as long as that runs, and ends it when nobody else does. A process of its own.

    python -m inflight.supervisor.janitor RUN_DIRECTORY SHARED_MEMORY_PREFIX   (standard input: the socket to listen on)
    python -m inflight.supervisor.janitor RUN_DIRECTORY SHARED_MEMORY_PREFIX now

The second form attends to nothing and ends the server (see `inflight.abandonment`).

                  ┌──────── the next supervisor connects ────────┐
                  ▼                                              │
              SUPERVISED ──connection ends: it was killed──> ORPHANED
                  │                                              │
                  └──"end"──> all is ended and removed <──late, or SIGTERM

A supervisor is whoever holds a connection to the janitor's socket; there is one at a time. A server that has lost its
supervisor goes on if it was serving: the janitor then reads what its programs print. All the time it keeps the server's
shared memory private. In the end it ends every process of that server, and removes its shared memory and its directory.
A normal stop uses it as well, so this code runs every time. Knows nothing of how a server is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType

from inflight.abandonment import Supervised
from inflight.supervisor import output_pipe, processes, shared_memory
from inflight.supervisor.log_file import open_log
from inflight.supervisor.own_program import command_of

GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL. No client waits for a response any more; ranks only need to leave MPI."""

SOCKET = "janitor"
"""In the run directory: where the janitor listens."""

SERVING = "serving"
"""In the run directory: a file that is there while the server is ready. One that is not has no streams to lose, and
ends with its supervisor."""

WELCOME, END = b"welcome\n", b"end\n"
"""What the janitor says to a supervisor, and what it is told by one."""

START_PATIENCE = 10.0
"""Seconds within which the supervisor that has started it connects."""

HELLO_PATIENCE = 5.0
"""Seconds within which one that has connected says who it is."""

READ_BYTES = 65536

NOW = "now"
"""On the command line: attend to nothing."""


class Ended(Exception):
    """SIGTERM while there is no supervisor."""


def sweep(run_directory: Path, prefix: str, grace: float = GRACE, spared: Collection[int | None] = frozenset()) -> None:
    """End the server's processes but those `spared`, and remove its shared-memory regions; the directory stays."""
    processes.end(lambda: [pid for pid in processes.marked(run_directory) if pid not in spared], grace)
    shared_memory.remove(prefix)


class Janitor:
    def __init__(self, run_directory: Path, listener: socket.socket) -> None:
        self._run_directory, self._listener = run_directory, listener
        self._outputs = output_pipe.open_all(run_directory)
        self._supervisor: socket.socket | None = None
        """Its connection. It stays open until the end of this process, by which a supervisor knows that all is done."""
        programs = (output_pipe.TRITONSERVER, output_pipe.OPENAI)
        self._logged = next((program for program in programs if program in self._outputs), "")
        """The program whose output is the log."""
        self._patience = START_PATIENCE
        """Seconds to wait for the next supervisor."""
        self._log_file = ""

    def attend(self) -> None:
        """Return when the server is to be ended."""
        while (supervisor := self._next_supervisor()) is not None:
            self._supervisor = supervisor
            if self._told_to_end(supervisor) or not (self._run_directory / SERVING).exists():
                return
            supervisor.close()

    def _told_to_end(self, supervisor: socket.socket) -> bool:
        """Wait until it says so; False if its connection ends before."""
        while True:
            ready, _, _ = select.select([supervisor, self._listener], [], [])
            if supervisor in ready:
                with contextlib.suppress(OSError):
                    return bool(supervisor.recv(len(END)))
                return False
            self._listener.accept()[0].close()  # another one comes too late

    def _next_supervisor(self) -> socket.socket | None:
        """Its connection; None if none comes in time."""
        deadline = time.monotonic() + self._patience
        try:
            with _interruptible(), self._kept_open():
                listener = self._listener.fileno()
                while (seconds := deadline - time.monotonic()) > 0:
                    ready, _, _ = select.select([listener, *self._outputs.values()], [], [], seconds)
                    self._read(ready)
                    if listener in ready and (supervisor := self._welcome()):
                        return supervisor
        except Ended:
            pass
        return None

    def _welcome(self) -> socket.socket | None:
        connection, _ = self._listener.accept()
        try:
            connection.settimeout(HELLO_PATIENCE)
            hello = json.loads(connection.recv(READ_BYTES))
            patience, log_file = float(hello["adopt_timeout"]), str(hello["log_file"])
            connection.sendall(WELCOME)
            connection.settimeout(None)
        except (OSError, ValueError, TypeError, KeyError):
            connection.close()
            return None
        self._patience, self._log_file = patience, log_file
        return connection

    def _read(self, ready: Collection[int]) -> None:
        """Take what programs have printed, so that no pipe is ever full. That of the log goes to its file."""
        for program, output in self._outputs.items():
            if output in ready:
                with contextlib.suppress(OSError):
                    printed = os.read(output, READ_BYTES)
                    if program == self._logged and self._log_file:
                        with open_log(Path(self._log_file)) as file:
                            file.write(printed)

    @contextlib.contextmanager
    def _kept_open(self) -> Iterator[None]:
        """Within the context no pipe ends, as it would with its last program: that would look like output for ever."""
        writers = [os.open(f"/proc/self/fd/{output}", os.O_WRONLY) for output in self._outputs.values()]
        try:
            yield
        finally:
            for writer in writers:
                os.close(writer)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Within the context SIGTERM raises Ended; outside it is ignored, because it may be meant for all processes of a
    group, and the supervisor ends the server."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_now(run_directory: Path, prefix: str) -> list[str]:
    """The command that ends the server, for when there is neither supervisor nor janitor."""
    return command_of("inflight.supervisor.janitor", str(run_directory), prefix, NOW)


def main(arguments: list[str]) -> int:
    run_directory, prefix = Path(arguments[0]), arguments[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if NOW in arguments[2:]:
        sweep(run_directory, prefix)
    else:
        Supervised(run_directory, end_now(run_directory, prefix))  # to the end of this process
        with shared_memory.RegionGuard(prefix):
            with socket.socket(fileno=os.dup(sys.stdin.fileno())) as listener:
                Janitor(run_directory, listener).attend()
            sweep(run_directory, prefix)
    shutil.rmtree(run_directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
