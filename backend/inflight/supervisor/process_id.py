"""Names a process for whoever comes later: by its pid and the time of its start, since pids are used again.

It is kept in a file of the run directory, one for each process of a server that must be found again.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from inflight.supervisor import processes

START_TIME = 19
"""Index of starttime among the fields of /proc/PID/stat after the name."""


@dataclass(frozen=True)
class ProcessId:
    pid: int
    start_time: int
    """In clock ticks since the machine was started."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Of a living process or a zombie. Raises OSError if it is gone."""
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return cls(pid, int(fields[START_TIME]))

    @classmethod
    def read(cls, file: Path) -> ProcessId | None:
        """None if the file does not hold one."""
        try:
            pid, start_time = file.read_text().split()
            return cls(int(pid), int(start_time))
        except (OSError, ValueError):
            return None

    def write(self, file: Path) -> None:
        """Never raises OSError: if the disk is full, the file names no process, and not an earlier one."""
        if ProcessId.read(file) == self:
            return
        draft = file.with_name(f".{file.name}")
        try:
            draft.write_text(f"{self.pid} {self.start_time}\n")
            draft.replace(file)
        except OSError:
            for wrong in (draft, file):
                with contextlib.suppress(OSError):
                    wrong.unlink(missing_ok=True)

    def open(self) -> int | None:
        """A pidfd, which is readable once the process has ended; None if it has ended already."""
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(self.pid)
            with contextlib.suppress(OSError):
                if ProcessId.of(self.pid) == self:
                    return descriptor
            os.close(descriptor)
        return None

    @property
    def is_running(self) -> bool:
        """False also for a zombie."""
        with contextlib.suppress(OSError):
            return ProcessId.of(self.pid) == self and processes.is_alive(self.pid)
        return False
