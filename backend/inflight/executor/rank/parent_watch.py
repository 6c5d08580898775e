"""Kills this process when its parent or its front has ended, even if that one was killed itself."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

PR_SET_PDEATHSIG = 1


def die_with_parent(front_pid: int | None) -> None:
    """From now on this process is killed when its parent ends, or when the process `front_pid` (of this machine) does.

    With an MPI launcher the parent is the launcher; the front is then watched on a thread.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        _end()
    if front_pid is not None and front_pid != parent:
        try:
            pidfd = os.pidfd_open(front_pid)
        except ProcessLookupError:
            _end()
        threading.Thread(target=_wait_and_end, args=(pidfd,), name="inflight-parent", daemon=True).start()


def _wait_and_end(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
