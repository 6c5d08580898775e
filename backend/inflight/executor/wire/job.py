"""Ranks of a job that somebody else started: the job's folder, and the mailbox of its leader.

The folder is named after the process that the job belongs to: rank 0 itself, or the process that `mpiexec` started in
its place (tritonserver, a program), whose child rank 0 then is. In the second case fronts pass their launches to rank 0
through the mailbox, a UNIX socket: it takes the next one when the last has ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from pathlib import Path

from inflight.executor.wire.address import private, user_directory
from inflight.executor.wire.launch import DESCRIPTION, Launch

JOBS = "jobs"
MAILBOX = "mailbox"
CURRENT = "launch"
"""Link to the directory of the newest launch that was posted."""
MAX_LAUNCH_BYTES = 1 << 17
"""Of the longest launch that a mailbox takes."""


class JobFolder:
    """The private folder of one job."""

    def __init__(self, pid: int) -> None:
        """`pid`: of the process that the job belongs to. Raises ConfigurationError."""
        self.pid = pid
        self.path = private(user_directory() / JOBS) / str(pid)

    def create(self) -> None:
        """Make it anew, and remove those of jobs that were killed."""
        for folder in self.path.parent.iterdir():
            if folder == self.path or not Path("/proc", folder.name).exists():
                shutil.rmtree(folder, ignore_errors=True)
        private(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    # -- the mailbox ---------------------------------------------------------------------------------------------------

    @property
    def mailbox(self) -> Path:
        return self.path / MAILBOX

    def open_mailbox(self) -> socket.socket:
        """The end that rank 0 reads, to be inherited by it."""
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        opened.bind(str(self.mailbox))
        return opened

    def post(self, launch: Launch) -> None:
        """Pass a launch to rank 0. Raises OSError if it is gone."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(launch.to_environment().encode(), str(self.mailbox))
        link = self.path / CURRENT
        link.unlink(missing_ok=True)
        link.symlink_to(launch.directory)

    def is_in_launch(self) -> bool:
        """Whether the ranks have not all left the newest launch."""
        return (self.path / CURRENT / DESCRIPTION).exists()


def take(mailbox: socket.socket) -> Launch:
    """The next launch; the mailbox must be readable."""
    return Launch.from_text(mailbox.recv(MAX_LAUNCH_BYTES).decode())


def note_end(launch: Launch) -> None:
    """Note, as rank 0, that all ranks have left the launch."""
    with contextlib.suppress(OSError):
        os.unlink(Path(launch.directory, DESCRIPTION))


def has_ended(launch: Launch) -> bool:
    """Whether all ranks have left it."""
    return not Path(launch.directory, DESCRIPTION).exists()


def is_served(socket_path: Path) -> bool:
    """Whether a leader listens there: a dead one's socket is still there if it was killed."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(socket_path))
        except BlockingIOError:
            return True  # one that is suspended has taken no connection for long
        except OSError:
            return False
    return True
