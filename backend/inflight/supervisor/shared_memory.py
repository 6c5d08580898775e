"""A server's regions of shared memory: prompts and answers pass through them, so they are its user's business alone.

tritonserver makes each region readable by everybody, whatever the umask. A guard takes that away as soon as a region
appears, which the kernel tells: within 0.1 ms as a rule, and 12 ms at most on two busy cores, so before any request.
Another user who opens the region in between keeps it open.
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
"""Events of inotify. tritonserver sets a region's mode in a second step, so that change must be seen as well."""

POLL = 0.5
"""Seconds between two looks where the kernel has no inotify left to give."""


def remove(prefix: str) -> None:
    """Remove every region whose name begins with `prefix`."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            region.unlink()


def narrow(prefix: str) -> None:
    """Let nobody but this user open regions whose name begins with `prefix`."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = region.lstat()
            # Anybody may put a file of such a name there, or a link to one of this user's.
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and found.st_mode & 0o077:
                region.chmod(0o600)


class RegionGuard:
    """Narrows regions as they appear, for as long as the context lasts."""

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
        sources = [self._end] if self._events is None else [self._end, self._events]
        while True:
            ready, _, _ = select.select(sources, [], [], POLL if self._events is None else None)
            if self._end in ready:
                return
            if self._events is not None:
                os.read(self._events, 65536)
            narrow(self._prefix)


def _watch(folder: Path) -> int | None:
    """A descriptor that becomes readable when a file in `folder` is made or changes its mode; None if there is none."""
    libc = ctypes.CDLL(None)
    descriptor: int = libc.inotify_init1(os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(folder), IN_CREATE | IN_ATTRIB) < 0:
        os.close(descriptor)
        return None
    return descriptor
