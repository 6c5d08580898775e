"""Runs processes at a lower priority for a while, where the system lets it be raised again afterwards.

Without the privilege for that (CAP_SYS_NICE, or a limit RLIMIT_NICE) a lowered priority would last for ever.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

NICENESS = 10
"""Added to the niceness of this process: a busy core then gives about a tenth of its time to the lowered one."""
LARGEST = 19


def can_restore_priority() -> bool:
    """Whether this process may raise a priority that it has lowered. Tried on a thread that ends."""
    restored: list[bool] = []

    def try_it() -> None:
        thread, niceness = threading.get_native_id(), _own_niceness()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(niceness + 1, LARGEST))
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
            restored.append(True)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return bool(restored)


def lower_priority(pids: Iterable[int]) -> None:
    """Of processes that have just been started; what they start inherits it."""
    _set_niceness(pids, min(_own_niceness() + NICENESS, LARGEST))


def restore_priority(pids: Iterable[int]) -> None:
    """Of processes with all their threads, to that of this process."""
    _set_niceness(pids, _own_niceness())


def _own_niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def _set_niceness(pids: Iterable[int], niceness: int) -> None:
    for task in (task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):  # it may end meanwhile
            os.setpriority(os.PRIO_PROCESS, int(task.name), niceness)
