"""Kills this process when its parent or its front has ended, even if that one was killed itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1


def die_with_parent(front_pid: int | None, parent: int | None = None) -> None:
    """From now on this process is killed when its parent ends, or when the process `front_pid` (of this machine) does.

    With an MPI launcher the parent is the launcher; the front is then watched on a thread. `parent`: who that is, if it
    may have ended by now; None = whoever it is.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        _end()
    if front_pid is not None and front_pid != parent:
        try:
            pidfd = os.pidfd_open(front_pid)
        except ProcessLookupError:
            _end()
        threading.Thread(target=_wait_and_end, args=(pidfd,), name="inflight-parent", daemon=True).start()


@contextlib.contextmanager
def dying_with(*pids: int) -> Iterator[None]:
    """Within the context, this process is killed when one of the processes `pids` of this machine ends."""
    done = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        pidfds = [os.pidfd_open(pid) for pid in pids]
    except ProcessLookupError:
        _end()
    thread = threading.Thread(target=_wait_and_end, args=(*pidfds, done), name="inflight-parent", daemon=True)
    thread.start()
    yield
    os.eventfd_write(done, 1)
    thread.join()
    for descriptor in (*pidfds, done):
        os.close(descriptor)


def _wait_and_end(*descriptors: int) -> None:
    """Until one is readable. If that is the last of several, nothing has ended but the watch."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll()]
    if len(descriptors) == 1 or descriptors[-1] not in ready:
        _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
