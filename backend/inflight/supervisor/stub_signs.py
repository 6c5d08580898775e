"""Finds stubs that hang, by their heartbeats: each stub updates the time of a file in the private directory.

A file is named INSTANCE.PID. A stub creates it once its model is loaded and removes it before it ends, so a stub
without a file is not checked. A file's time is only compared with its own earlier time, never with a clock, so a change
of the machine's date does no harm. Knows nothing of what a stub does.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from inflight.supervisor import processes

SILENT_SECONDS = 6.0
"""A stub that is idle and sends no heartbeat for so long hangs. The interval of heartbeats is one second."""

BUSY_SECONDS = 60.0
"""The same for a stub that uses CPU time: it may be in a long call that holds the GIL."""

BUSY_SHARE = 0.05
"""The share of a core above which a stub counts as busy; threads that only wait use less."""

OVERSLEPT_SECONDS = 2.0
"""If two checks are further apart, this process, or the whole machine, was suspended: all silences start anew."""


@dataclass(slots=True)
class _Sign:
    """The last heartbeat of a stub."""

    time_ns: int
    """Modification time of the file."""
    seen: float
    """When this process first saw that time, in seconds."""
    cpu_seconds: float
    """CPU time that the stub had used by then."""


class StubSigns:
    """The heartbeats of all stubs of one server."""

    def __init__(self, directory: Path) -> None:
        """`directory` need not exist yet."""
        self._directory = directory
        self._signs: dict[str, _Sign] = {}
        self._looked = 0.0

    def silent_stub(self, now: float) -> str | None:
        """Name of a stub that hangs, else None. `now` in seconds, monotonic. To be called about twice a second."""
        if now - self._looked > OVERSLEPT_SECONDS:
            self._signs.clear()
        self._looked = now
        found: dict[str, _Sign] = {}
        for file in self._directory.glob("*.*"):
            instance, _, pid = file.name.rpartition(".")
            with contextlib.suppress(OSError):
                if not processes.is_alive(int(pid)):
                    # A dead stub is reported elsewhere. Its file goes, as a new process may get the same pid.
                    file.unlink()
                    continue
                time_ns, cpu_seconds = file.stat().st_mtime_ns, processes.cpu_seconds(int(pid))
                sign = self._signs.get(file.name)
                if sign is None or sign.time_ns != time_ns:
                    sign = _Sign(time_ns, now, cpu_seconds)
                found[file.name] = sign
                if _stands_still(now - sign.seen, cpu_seconds - sign.cpu_seconds):
                    return instance
        self._signs = found
        return None


def _stands_still(silent: float, cpu_seconds: float) -> bool:
    """`silent`: seconds since the last heartbeat; `cpu_seconds`: CPU time that the stub has used since."""
    return silent > (BUSY_SECONDS if cpu_seconds > BUSY_SHARE * silent else SILENT_SECONDS)
