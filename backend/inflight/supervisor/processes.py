"""Which processes belong to a server, and how they are ended: by reading /proc.

A server's processes (tritonserver, its stubs, mpiexec, ranks) are known by one variable of their environment, which
survives whatever sessions and parents they have; that is how none is forgotten when one of them is killed. Knows
nothing of what they do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from inflight.run_directory import RUN_DIRECTORY

STUB = "triton_python_backend_stub"
NAME_LENGTH = 15
"""The kernel keeps that much of a program's name."""


def marked(run_directory: Path) -> list[int]:
    """Pids of living processes, this one excepted, that carry the mark of `run_directory`."""
    mark = f"{RUN_DIRECTORY}={run_directory}".encode()
    found = []
    for pid in _all():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def stubs(parent: int) -> dict[int, str]:
    """The Python backend's stub processes under `parent`, dead ones that it has not collected included.

    pid -> instance name, e.g. "llm_0_0"; "" for a dead one, whose command line is gone.
    """
    found = {}
    for pid in _all():
        with contextlib.suppress(OSError, IndexError, ValueError):
            name, _, above = _status(pid)
            if above == parent and name == STUB[:NAME_LENGTH]:
                found[pid] = _instance(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    return found


def is_alive(pid: int) -> bool:
    """False for a process that is gone or a zombie."""
    try:
        return _status(pid)[1] not in "ZX"
    except (OSError, IndexError, ValueError):
        return False


def is_zombie(pid: int) -> bool:
    """True for a process that has ended and that its parent has not yet asked about."""
    try:
        return _status(pid)[1] == "Z"
    except (OSError, IndexError, ValueError):
        return False


def cpu_seconds(pid: int) -> float:
    """Processor time that all its threads have used. Raises OSError for a process that is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def end(pids: Callable[[], Iterable[int]], grace: float) -> None:
    """Ask every process that `pids` finds to terminate, and kill those that have not within `grace` seconds."""
    deadline = time.monotonic() + grace
    asked: set[int] = set()
    while remaining := [pid for pid in pids() if is_alive(pid)]:
        expired = time.monotonic() >= deadline
        for pid in remaining:
            if expired or pid not in asked:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if expired else signal.SIGTERM)
        time.sleep(0.02)


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _status(pid: int) -> tuple[str, str, int]:
    """Name, state letter and parent's pid. The name may hold anything, so the last bracket ends it."""
    head, _, tail = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    fields = tail.split()
    return head.partition("(")[2], fields[0], int(fields[1])


def _instance(words: list[bytes]) -> str:
    """The instance's name in a stub's command line: the only word made of a model's name and two numbers."""
    for word in reversed(words):
        head, _, tail = word.decode(errors="replace").rpartition("_")
        if tail.isdigit() and head.rpartition("_")[2].isdigit() and "/" not in head:
            return word.decode()
    return ""
