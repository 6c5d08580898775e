"""A named pipe of the run directory, into which a program of the server prints.

Whoever supervises the server reads it; while nobody does, the janitor. That keeps an end open all the time, so that a
program never finds the pipe without a reader, which would end it.
"""

from __future__ import annotations

import os
from pathlib import Path

OUTPUTS = "outputs"
"""Folder of the pipes in the run directory."""

TRITONSERVER, OPENAI = "tritonserver", "openai"


class OutputPipe:
    def __init__(self, run_directory: Path, program: str) -> None:
        self._path = run_directory / OUTPUTS / program

    def make(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        os.mkfifo(self._path, 0o600)

    def open_reader(self) -> int:
        """A descriptor that blocks until something is printed, and ends once no program has the pipe open."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)  # else it waits for a program
        os.set_blocking(descriptor, True)
        return descriptor

    def open_writer(self) -> int:
        """A descriptor for a program. To be called when the pipe has a reader."""
        return os.open(self._path, os.O_WRONLY)


def open_all(run_directory: Path) -> dict[str, int]:
    """Program -> a reading end that does not block."""
    pipes = sorted((run_directory / OUTPUTS).glob("*"))
    return {pipe.name: os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) for pipe in pipes}
