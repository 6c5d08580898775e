"""Ends this process when the one it works for is gone, even if that was killed. Knows nothing else."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

PR_SET_PDEATHSIG = 1


def die_with_parent(front_pid: int | None) -> None:
    """Be killed when our parent ends, or when the process `front_pid` (of this machine) does.

    The parent is a launcher, where there is one; then the front is watched as well, on a thread.
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
