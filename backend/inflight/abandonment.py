"""What is left of a server ends by itself once supervisor and janitor are gone, which were killed both.

The two hold a shared lock on a file of the run directory, which the kernel gives back with a process however it ends.
The server's other processes wait for that lock alone, each on a thread: one of them gets it, and starts what the file
names, which ends them all and removes the server's shared memory and directory. Knows neither of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from inflight.run_directory import run_directory

FILE = "supervised"


class Supervised:
    """The lock of one that supervises the server, until it is released or its process ends."""

    def __init__(self, run_directory: Path, end: Sequence[str]) -> None:
        """`end`: the command that ends the server and removes what it leaves. Raises OSError."""
        self._descriptor = os.open(run_directory / FILE, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        os.pwrite(self._descriptor, json.dumps(list(end)).encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)


def end_when_abandoned() -> None:
    """From now on this process ends, with all others of its server, when nobody supervises it. Does nothing without a
    supervisor."""
    directory = run_directory()
    if directory is not None and (directory / FILE).exists():
        threading.Thread(target=_wait_and_end, args=(directory,), name="inflight-abandoned", daemon=True).start()


def _wait_and_end(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError), open(directory / FILE, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # The folder in which this process was started is anybody's, and Python would import from it.
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            json.load(file), cwd=directory, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )
        process.wait()  # it ends this one
