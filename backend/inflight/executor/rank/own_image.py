"""What /proc shows of this process: its arguments and its environment, which a forked process has from its parent.

A launch is found by what /proc/PID/environ shows, whatever the parents and sessions of its processes are. The kernel
reads both from where it laid them at the start of the program (proc(5): fields arg_start to env_end of /proc/PID/stat),
so they are written there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ARG_START = 48
"""Number of the first of four fields of /proc/PID/stat, counted from 1; `arg_end`, `env_start`, `env_end` follow it."""


def become(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Take `environment` as this process's whole one, and show it and `arguments`. Raises ValueError if either is
    longer than what the process was started with."""
    argument_area, environment_area = _areas()
    texts = _joined(arguments), _joined(f"{name}={value}" for name, value in environment.items())
    for text, (start, end) in zip(texts, (argument_area, environment_area), strict=True):
        if len(text) > end - start:
            raise ValueError(f"{len(text)} bytes of arguments or environment do not fit into {end - start}")
    # First of all the C library's variables leave the area, for memory of its own.
    os.environ.clear()
    os.environ.update(environment)
    for text, (start, end) in zip(texts, (argument_area, environment_area), strict=True):
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def _areas() -> tuple[tuple[int, int], tuple[int, int]]:
    """Addresses of the arguments and of the environment: of the first byte, and behind the last."""
    # The second field is the program's name in parentheses, which may hold spaces and parentheses.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first = ARG_START - 3
    arg_start, arg_end, env_start, env_end = map(int, fields[first : first + 4])
    return (arg_start, arg_end), (env_start, env_end)


def _joined(texts: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in texts)
