"""Ranks that somebody else has started, watched where they run on this machine: so their death is known at once, rather
than by missing heartbeats.

Ends no process.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable


class FoundRanks:
    def __init__(self, pids: Iterable[int]) -> None:
        """`pids`: of those on this machine."""
        self._pidfds: list[int] = []
        self._was_late = False
        """One had ended before it could be watched."""
        for pid in pids:
            try:
                self._pidfds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                self._was_late = True

    def fds(self) -> list[int]:
        """Readable once a rank ends, one for each."""
        return list(self._pidfds)

    def has_ended(self, ready_fds: Collection[object]) -> bool:
        """Whether one of them has. `ready_fds`: those of `fds` readable now."""
        return self._was_late or any(pidfd in ready_fds for pidfd in self._pidfds)

    def release(self) -> None:
        """Watch them no longer."""
        while self._pidfds:
            os.close(self._pidfds.pop())
