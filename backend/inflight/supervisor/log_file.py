"""The file with tritonserver's whole log. If the disk is full, lines are lost, and the server goes on."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path


def open_log(path: Path) -> io.FileIO:
    """To append to; a file that is made is this user's alone. Raises OSError."""
    return io.FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


class LogFile:
    """Appends lines, from one thread. Reports once that it cannot write, and once that it can again."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self._path, self._tell = path, tell
        self._file: io.FileIO | None = None
        self._num_lost = 0

    def write(self, line: str) -> None:
        """Append a line, given without its line end. Never raises OSError."""
        try:
            if self._file is None:
                self._file = open_log(self._path)
            data = f"{line}\n".encode(errors="replace")
            if self._file.write(data) != len(data):
                raise OSError(0, "the disk is full")
        except OSError as error:
            if not self._num_lost:
                self._tell(
                    f"the log file {self._path} cannot be written ({error.strerror}): lines are lost until it can"
                )
            self._num_lost += 1
            self.close()
            return
        if self._num_lost:
            self._tell(f"the log file {self._path} is written again; {self._num_lost} lines were lost")
            self._num_lost = 0

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
