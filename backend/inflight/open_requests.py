"""How many requests a stub holds that have no final response yet: a number in a file, which outlives the stub.

When a stub is killed, tritonserver 2.51 answers the requests that it is just handing over, but never those that the
stub had taken: their clients would wait for ever. The supervisor reads here whether there are any. The number is one
of 8 bytes in the machine's order, at the start of a file INSTANCE.PID of the run directory.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

from inflight.run_directory import OPEN_REQUESTS, run_directory

logger = logging.getLogger(__name__)

_NUMBER = struct.Struct("=Q")


class OpenRequests:
    """The number of one stub, this process. Thread safe. Without a supervisor nobody can read it."""

    def __init__(self, instance: str) -> None:
        """`instance`: tritonserver's name of the model instance, e.g. "llm_0_0"."""
        self._lock = threading.Lock()
        self._number = 0
        self._memory: mmap.mmap | None = None
        directory = run_directory()
        if directory is None:
            return
        # Two stubs have the same instance name while a model is reloaded in place, so the pid belongs to the name.
        self._file = directory / OPEN_REQUESTS / f"{instance}.{os.getpid()}"
        try:
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_bytes(_NUMBER.pack(0))
            with self._file.open("r+b") as opened:
                self._memory = mmap.mmap(opened.fileno(), _NUMBER.size)
        except OSError as error:
            logger.warning("the supervisor cannot be shown how many requests are open: %s", error)

    def begin(self) -> None:
        self._add(1)

    def end(self) -> None:
        self._add(-1)

    def close(self) -> None:
        """Remove the file: this stub ends by itself, and has answered everything."""
        if self._memory is not None:
            self._file.unlink(missing_ok=True)

    def _add(self, change: int) -> None:
        with self._lock:
            self._number += change
            if self._memory is not None:
                _NUMBER.pack_into(self._memory, 0, self._number)


@dataclass(frozen=True)
class Left:
    """What a stub that was killed has left."""

    instance: str
    """Name of its model instance."""
    num_open: int

    @property
    def model(self) -> str:
        """The instance's name without its two numbers."""
        return self.instance.rpartition("_")[0].rpartition("_")[0]


def take_left(run_directory: Path, pid: int) -> Left | None:
    """Read and remove the file of a stub that has ended; None if it has left none."""
    for file in (run_directory / OPEN_REQUESTS).glob(f"*.{pid}"):
        try:
            left = Left(file.name.rpartition(".")[0], int(_NUMBER.unpack(file.read_bytes())[0]))
            file.unlink()
        except (OSError, struct.error):
            return None
        return left
    return None
