"""Which stub has stopped: each shows that it is alive by renewing the time of a file in the private directory.

A file is named INSTANCE.PID. A stub makes it once its model is loaded and removes it before it ends, so whoever has no
file is not waited for. Times are never compared with a clock of this process, only with what they were before: that
the machine's date was changed means nothing. Knows nothing of what a stub does.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from inflight.supervisor import processes

SILENT_SECONDS = 6.0
"""A stub that is silent and idle for so long stands still; it gives a sign every second."""

BUSY_SECONDS = 60.0
"""One that computes may be in a call that keeps the interpreter to itself, which ends some time; this long is never."""

BUSY_SHARE = 0.05
"""Of a core: more than the threads of a process use that only wait."""

OVERSLEPT_SECONDS = 2.0
"""Between two looks: so long after the last one it was we who stood still, and perhaps the whole machine with us."""


@dataclass(slots=True)
class _Sign:
    """The last one of a stub."""

    time_ns: int
    """As the file says."""
    seen: float
    """When we first saw it so."""
    cpu_seconds: float
    """What the stub had used by then."""


class StubSigns:
    def __init__(self, directory: Path) -> None:
        """`directory` may come later."""
        self._directory = directory
        self._signs: dict[str, _Sign] = {}
        self._looked = 0.0

    def silent_stub(self, now: float) -> str | None:
        """Name of a stub that stands still, else None. `now` in seconds, monotonic. Ask often: twice a second."""
        if now - self._looked > OVERSLEPT_SECONDS:
            self._signs.clear()
        self._looked = now
        found: dict[str, _Sign] = {}
        for file in self._directory.glob("*.*"):
            instance, _, pid = file.name.rpartition(".")
            with contextlib.suppress(OSError):
                if not processes.is_alive(int(pid)):
                    # How a stub ended is not told here; one that has its pid by chance must not take over its file.
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
    """`silent`: seconds since the last sign; `cpu_seconds`: what it has used since."""
    return silent > (BUSY_SECONDS if cpu_seconds > BUSY_SHARE * silent else SILENT_SECONDS)
