"""Notices processes that a signal has stopped (SIGSTOP, SIGTSTP): they do not end, and say nothing of it.

A process that a debugger holds is in another state, and so is one that computes for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from inflight.executor.wire.launcher import LOOKS_PER_SECOND

STOPPED_SECONDS = 2.0
"""After so long a stopped process is not waited for any more."""
INTERVAL = 1 / LOOKS_PER_SECOND
"""Seconds between two looks at least."""
LONGEST_INTERVAL = 1.0
"""What counts of the time between two looks at most: this process may have been stopped together with the others."""


class StoppedProcesses:
    def __init__(self, pids: Callable[[], Iterable[int]], clock: Callable[[], float] = time.monotonic) -> None:
        """`pids`: of the processes to look at, asked at each look."""
        self._pids = pids
        self._clock = clock
        self._last_look = clock()
        self._seconds: dict[int, float] = {}  # of processes that were stopped at the last look

    def look(self) -> int | None:
        """One that has been stopped for STOPPED_SECONDS; None = there is none, or it is not time to look yet."""
        passed = self._clock() - self._last_look
        if passed < INTERVAL:
            return None
        self._last_look += passed
        stopped = [pid for pid in self._pids() if _is_stopped(pid)]
        counted = min(passed, LONGEST_INTERVAL)
        self._seconds = {pid: self._seconds[pid] + counted if pid in self._seconds else 0.0 for pid in stopped}
        return next((pid for pid, seconds in self._seconds.items() if seconds >= STOPPED_SECONDS), None)


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False  # it has ended
    # The program's name, in parentheses, may contain anything.
    return status.rpartition(b") ")[2].startswith(b"T")
