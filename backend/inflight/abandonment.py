"""What is left of a server ends by itself once supervisor and janitor are gone, which were killed both.

The two hold a shared lock on a file of the run directory, which the kernel gives back with a process however it ends.
The server's other processes wait for that lock alone, each on a thread: one of them gets it, and starts what the file
names, which ends them all and removes the server's shared memory and directory. If none was left either, the next
supervisor on the machine does that. Knows none of them.
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
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Names the kernel that runs here. Its locks need not be seen by another machine that shares the folder."""


class Supervised:
    """The lock of one that supervises the server, until it is released or its process ends."""

    def __init__(self, run_directory: Path, end: Sequence[str]) -> None:
        """`end`: the command that ends the server and removes what it leaves. Raises OSError."""
        self._descriptor = os.open(run_directory / FILE, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        named = json.dumps({"kernel": _kernel(), "end": list(end)}).encode()
        os.pwrite(self._descriptor, named, 0)
        os.ftruncate(self._descriptor, len(named))

    def release(self) -> None:
        os.close(self._descriptor)


def end_when_abandoned() -> None:
    """From now on this process ends, with all others of its server, when nobody supervises it. Does nothing without a
    supervisor."""
    directory = run_directory()
    if directory is not None and (directory / FILE).exists():
        threading.Thread(target=_wait_and_end, args=(directory,), name="inflight-abandoned", daemon=True).start()


def end_if_abandoned(directory: Path) -> bool:
    """End and remove what is left of the server with this run directory, if nobody supervises it for certain. Returns
    whether that is so."""
    try:
        with open(directory / FILE, "rb") as file:
            named = json.load(file)
            if not named["kernel"] or named["kernel"] != _kernel() or _is_supervised(file.fileno()):
                return False
            _end(named["end"], directory)
            return True
    except (OSError, ValueError, KeyError, TypeError):
        return False  # such as of a server that is being made, or by a Python that is gone


def _kernel() -> str:
    """ "" = it has no name."""
    try:
        return BOOT.read_text()
    except OSError:
        return ""


def _is_supervised(descriptor: int) -> bool:
    """Whether a supervisor has the lock. It has not where one of the server's own processes has it, and ends it."""
    for kind, found in ((fcntl.LOCK_EX, False), (fcntl.LOCK_SH, True)):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return found
    return False


def _wait_and_end(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError), open(directory / FILE, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _end(json.load(file)["end"], directory)


def _end(command: Sequence[str], directory: Path) -> None:
    """Run it to its end, which may be that of this process, too."""
    # The folder in which this process was started is anybody's, and Python would import from it.
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=directory, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    process.wait()
