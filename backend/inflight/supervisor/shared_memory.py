"""Makes a server's shared-memory regions private to its user, because prompts and responses pass through them.

tritonserver makes each region readable by every user, whatever the umask. A guard restricts a region's mode as soon as
inotify reports it: within 0.1 ms as a rule, and 12 ms at most on two busy cores, so before any request. Another user
who opens the region in between can go on reading it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import stat
import threading
from pathlib import Path
from types import TracebackType

SHARED_MEMORY = Path("/dev/shm")

IN_ATTRIB, IN_CREATE = 0x004, 0x100
"""Events of inotify. tritonserver sets a region's mode after it has created it, so changes of the mode count too."""

POLL = 0.5
"""Seconds between two polls if inotify's limit of instances or watches is reached."""


def remove(prefix: str) -> None:
    """Remove every region whose name begins with `prefix`."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            region.unlink()


def narrow(prefix: str) -> None:
    """Set the mode of regions whose name begins with `prefix` so that only this user can open them."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = region.lstat()
            # Any user may create a file with such a name there, or a link to a file of this user.
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and found.st_mode & 0o077:
                region.chmod(0o600)


class RegionGuard:
    """Restricts the mode of new regions for as long as the context lasts."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._events = _watch(SHARED_MEMORY)
        self._thread = threading.Thread(target=self._run, name="region-guard", daemon=True)

    def __enter__(self) -> RegionGuard:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for descriptor in (self._end, self._events):
            if descriptor is not None:
                os.close(descriptor)

    def _run(self) -> None:
        narrow(self._prefix)  # those of before, if an earlier guard was killed
        sources = [self._end] if self._events is None else [self._end, self._events]
        while True:
            ready, _, _ = select.select(sources, [], [], POLL if self._events is None else None)
            if self._end in ready:
                return
            if self._events is not None:
                os.read(self._events, 65536)
            narrow(self._prefix)


def _watch(folder: Path) -> int | None:
    """An inotify descriptor that becomes readable when a file in `folder` is created or changes its mode; None if the
    system refuses one."""
    libc = ctypes.CDLL(None)
    descriptor: int = libc.inotify_init1(os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(folder), IN_CREATE | IN_ATTRIB) < 0:
        os.close(descriptor)
        return None
    return descriptor
