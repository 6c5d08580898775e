"""A process that an earlier supervisor has started. It is no child of this one, and its exit code is never known.

It has of `subprocess.Popen` what a supervisor needs to watch and end a process.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

from inflight.supervisor.process_id import ProcessId

UNKNOWN = 256
"""In place of an exit code; no process has this one."""


class AdoptedProcess:
    def __init__(self, file: Path) -> None:
        """`file` holds its ProcessId. If it does not, or if that process is gone, the process counts as ended."""
        found = ProcessId.read(file)
        self.pid = found.pid if found is not None else 0
        self._descriptor = found.open() if found is not None else None

    def poll(self) -> int | None:
        """None while it runs."""
        if self._has_ended(0.0) and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        return None if self._descriptor is not None else UNKNOWN

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired after `timeout` seconds."""
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return UNKNOWN

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None and self._descriptor is not None:
            signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout: float | None) -> bool:
        """Wait for `timeout` seconds, or for ever."""
        if self._descriptor is None:
            return True
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))
