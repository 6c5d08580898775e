"""The file that keeps tritonserver's whole log. A disk that is full costs lines of it, and nothing else."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path


class LogFile:
    """Appends lines, from one thread. Says once that it cannot, and once that it can again."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self._path, self._tell = path, tell
        self._file: io.FileIO | None = None
        self._num_lost = 0

    def write(self, line: str) -> None:
        """Append a line, without its end; never raises OSError."""
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
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
