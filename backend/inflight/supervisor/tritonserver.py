"""One run of tritonserver: its process and the stubs it started.

Knows how a server is started, watched and killed; the supervisor decides when.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from inflight.supervisor import output_pipe, processes
from inflight.supervisor.adopted_process import UNKNOWN, AdoptedProcess
from inflight.supervisor.output_pipe import OutputPipe
from inflight.supervisor.process_id import ProcessId

PROCESS_FILE = "tritonserver.pid"
"""In the run directory: names the process."""

GIVEN_UP = "given_up"
"""In the run directory: the pids of dead stubs that are not to be reported any more, for the next supervisor."""

ZOMBIE_GRACE = 1.0
"""Seconds within which tritonserver waits for a stub that it ended itself; one that is a zombie longer was killed."""

SCAN_PERIOD = 4.0
"""Seconds between two searches for new stubs in /proc, which are most of the work of an idle supervisor."""


@dataclass(frozen=True)
class DeadStub:
    """A stub that ended, but not by tritonserver."""

    pid: int
    instance: str
    """Name of the model instance, e.g. "llm_0_0"; "" if no scan has seen it alive."""

    def __str__(self) -> str:
        return self.instance or f"of pid {self.pid}"


class Tritonserver:
    def __init__(
        self, process: subprocess.Popen[bytes] | AdoptedProcess, reader: int, given_up: Collection[int], notes: Path
    ) -> None:
        """`reader`: a descriptor with what it prints. `given_up`: the pids in the file `notes`."""
        self._process, self._notes = process, notes
        self.output: IO[str] = os.fdopen(reader, errors="replace")
        self._stubs: dict[int, str] = {}
        """pid of a stub -> instance name, as of the last scan."""
        self._next_scan = 0.0
        self._zombies: dict[int, float] = {}
        """pid of a stub -> when it was first seen to be a zombie."""
        self._given_up = set(given_up)

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], run_directory: Path) -> Tritonserver:
        """In a session of its own, so that Ctrl-C in a terminal reaches only the supervisor."""
        notes = run_directory / GIVEN_UP
        notes.unlink(missing_ok=True)
        pipe = OutputPipe(run_directory, output_pipe.TRITONSERVER)
        reader = pipe.open_reader()
        with open(pipe.open_writer(), "wb") as printed:
            process = subprocess.Popen(
                list(command),
                env=dict(environment),
                cwd=run_directory,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )
        ProcessId.of(process.pid).write(run_directory / PROCESS_FILE)
        return cls(process, reader, (), notes)

    @classmethod
    def adopt(cls, run_directory: Path) -> Tritonserver:
        """The one that an earlier supervisor has started; it may have ended since."""
        reader = OutputPipe(run_directory, output_pipe.TRITONSERVER).open_reader()
        notes = run_directory / GIVEN_UP
        given_up = [int(pid) for pid in notes.read_text().split()] if notes.exists() else []
        return cls(AdoptedProcess(run_directory / PROCESS_FILE), reader, given_up, notes)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def dead_stub(self) -> DeadStub | None:
        """A stub that ended, but not by tritonserver, else None. To be called about twice a second."""
        now = time.monotonic()
        if now >= self._next_scan:
            self._next_scan = now + SCAN_PERIOD
            found = processes.stubs(self.pid)
            self._stubs = {pid: name or self._stubs.get(pid, "") for pid, name in found.items()}
            self._given_up &= found.keys()
        zombies = [pid for pid in self._stubs if pid not in self._given_up and processes.is_zombie(pid)]
        self._zombies = {pid: self._zombies.get(pid, now) for pid in zombies}
        for pid, since in self._zombies.items():
            if now - since >= ZOMBIE_GRACE:
                return DeadStub(pid, self._stubs[pid])
        return None

    def give_up(self, stub: DeadStub) -> None:
        """Report this dead stub no more: it stays a zombie until tritonserver has freed its model."""
        self._given_up.add(stub.pid)
        with contextlib.suppress(OSError), self._notes.open("a") as notes:
            notes.write(f"{stub.pid}\n")

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> bool:
        """True once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self.returncode is not None


def ended(returncode: int | None) -> str:
    """How a process ended, as part of a message."""
    if returncode == UNKNOWN:
        return "an earlier supervisor had started it, so nobody knows how"
    if returncode is None or returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal.Signals(-returncode).name}"
