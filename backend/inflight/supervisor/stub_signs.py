"""Detects a stub that has stopped: each stub shows that it is alive by renewing the time of a file.

The files are in the folder SIGNS of the run directory and are named INSTANCE.PID. A stub creates its file once its
model is loaded and removes it before it ends, so a stub without a file is not expected to give signs. A file's time is
compared only with its earlier times, never with a clock of this process, so a change of the machine's date has no
effect. Knows nothing of what a stub does.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from inflight.supervisor import processes

SILENT_SECONDS = 6.0
"""A stub that gives no sign and uses no CPU for so long counts as stopped; signs are due every second."""

BUSY_SECONDS = 60.0
"""The limit for a stub that uses CPU: it may be in a call that holds the interpreter's lock; none takes this long."""

BUSY_SHARE = 0.05
"""Share of a core above which a stub counts as computing; the threads of a waiting process use less."""

OVERSLEPT_SECONDS = 2.0
"""If two checks are further apart than this, this process was suspended, perhaps with the whole machine, and missed
signs prove nothing."""


@dataclass(slots=True)
class _Sign:
    """The last sign of one stub."""

    time_ns: int
    """Modification time of the file."""
    seen: float
    """When this process first saw that time."""
    cpu_seconds: float
    """CPU time that the stub had used by then."""


class StubSigns:
    def __init__(self, directory: Path) -> None:
        """`directory` need not exist yet."""
        self._directory = directory
        self._signs: dict[str, _Sign] = {}
        self._looked = 0.0

    def silent_stub(self, now: float) -> str | None:
        """Name of a stub that has stopped, or None. `now` in seconds, monotonic. To be called about twice a second."""
        if now - self._looked > OVERSLEPT_SECONDS:
            self._signs.clear()
        self._looked = now
        found: dict[str, _Sign] = {}
        for file in self._directory.glob("*.*"):
            instance, _, pid = file.name.rpartition(".")
            with contextlib.suppress(OSError):
                if not processes.is_alive(int(pid)):
                    # Not reported here, only cleaned up: a later process with the same pid must not inherit the file.
                    file.unlink()
                    continue
                time_ns, cpu_seconds = file.stat().st_mtime_ns, processes.cpu_seconds(int(pid))
                sign = self._signs.get(file.name)
                if sign is None or sign.time_ns != time_ns:
                    sign = _Sign(time_ns, now, cpu_seconds)
                found[file.name] = sign
                if _has_stopped(now - sign.seen, cpu_seconds - sign.cpu_seconds):
                    return instance
        self._signs = found
        return None


def _has_stopped(silent: float, cpu_seconds: float) -> bool:
    """`silent`: seconds since the last sign; `cpu_seconds`: CPU time used since."""
    return silent > (BUSY_SECONDS if cpu_seconds > BUSY_SHARE * silent else SILENT_SECONDS)
