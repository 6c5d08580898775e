"""One run of tritonserver: its process and the stubs it started.

Knows how a server is started, watched and killed; the supervisor decides when.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from inflight.supervisor import processes

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
    """Starts when it is created, in a session of its own, so that Ctrl-C in a terminal reaches only the supervisor."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], directory: Path) -> None:
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._stubs: dict[int, str] = {}
        """pid of a stub -> instance name, as of the last scan."""
        self._next_scan = 0.0
        self._zombies: dict[int, float] = {}
        """pid of a stub -> when it was first seen to be a zombie."""
        self._given_up: set[int] = set()
        """Pids of dead stubs that are not to be reported any more."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> IO[str]:
        return cast("IO[str]", self._process.stdout)

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

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def wait(self, timeout: float) -> bool:
        """True once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self._process.returncode is not None


def ended(returncode: int | None) -> str:
    """How a process ended, as part of a message."""
    if returncode is None or returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal.Signals(-returncode).name}"
