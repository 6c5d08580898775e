"""One run of tritonserver: its process and the stubs it started.

Knows how a server is started, watched and killed, not when: that is the supervisor's.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from inflight.supervisor import processes

ZOMBIE_GRACE = 1.0
"""Seconds in which tritonserver collects a stub that it ended itself; one that is still a zombie then was killed."""


SCAN_PERIOD = 4.0
"""Seconds between two looks for new stubs: a walk through /proc, so it is what an idle supervisor costs."""


class Tritonserver:
    """Starts at once. It has a session of its own, so that Ctrl-C in a terminal reaches the supervisor alone."""

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
        """pid of a stub -> when it was first seen to have ended without having been collected."""

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

    def killed_stub(self) -> str | None:
        """Name of a stub that ended without tritonserver having ended it, else None. Ask often: twice a second."""
        now = time.monotonic()
        if now >= self._next_scan:
            self._next_scan = now + SCAN_PERIOD
            found = processes.stubs(self.pid)
            self._stubs = {pid: name or self._stubs.get(pid, "") for pid, name in found.items()}
        zombies = [pid for pid in self._stubs if processes.is_zombie(pid)]
        self._zombies = {pid: self._zombies.get(pid, now) for pid in zombies}
        for pid, since in self._zombies.items():
            if now - since >= ZOMBIE_GRACE:
                return self._stubs[pid] or f"of pid {pid}"
        return None

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
    """How a process ended, for a sentence."""
    if returncode is None or returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal.Signals(-returncode).name}"
