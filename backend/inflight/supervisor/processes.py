"""Finds the processes of a server in /proc, and ends them.

A server's processes (tritonserver, its stubs, mpiexec, ranks) are recognised by a variable of their environment, which
they have whatever their sessions and parents are, so that none is missed when one of them is killed. Knows nothing of
what they do.
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
"""Number of characters of a program's name that the kernel keeps."""


def marked(run_directory: Path) -> list[int]:
    """Pids of the processes, except this one, whose environment names `run_directory`."""
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
    """The stub processes of the Python backend whose parent is `parent`, zombies included.

    pid -> instance name, e.g. "llm_0_0"; "" for a zombie, which has no command line.
    """
    found = {}
    for pid in _all():
        with contextlib.suppress(OSError, IndexError, ValueError):
            name, _, above = _status(pid)
            if above == parent and name == STUB[:NAME_LENGTH]:
                found[pid] = _instance(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    return found


def named(name: str) -> list[int]:
    """Pids of this user's processes of a program."""
    found = []
    for pid in _all():
        with contextlib.suppress(OSError, IndexError, ValueError):
            if _status(pid)[0] == name[:NAME_LENGTH] and Path(f"/proc/{pid}").stat().st_uid == os.getuid():
                found.append(pid)
    return found


def is_alive(pid: int) -> bool:
    """False for a process that is gone or a zombie."""
    try:
        return _status(pid)[1] not in "ZX"
    except (OSError, IndexError, ValueError):
        return False


def is_zombie(pid: int) -> bool:
    """True for a process that has ended and whose parent has not waited for it yet."""
    try:
        return _status(pid)[1] == "Z"
    except (OSError, IndexError, ValueError):
        return False


def cpu_seconds(pid: int) -> float:
    """Processor time that all its threads have used. Raises OSError for a process that is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


LOOKS = 2
"""In a row that must find no process. One is not enough: a process that becomes another program (execve) shows no
variables meanwhile, by which it would be found."""


def end(pids: Callable[[], Iterable[int]], grace: float) -> None:
    """Send SIGTERM to every process that `pids` finds, and SIGKILL to those that live after `grace` seconds. Returns
    when all have ended."""
    deadline = time.monotonic() + grace
    asked: set[int] = set()
    looks_without = 0
    while looks_without < LOOKS:
        remaining = [pid for pid in pids() if is_alive(pid)]
        looks_without = 0 if remaining else looks_without + 1
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
    """Name, state letter and parent's pid. The name may contain brackets, so the last one ends it."""
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
