"""Where the launches come from that rank 0 of a job broadcasts: a file, or the fronts of a process under `mpiexec`.

OwnLaunch         `--config`: one launch, whose end is that of the ranks. Fronts come and go. A signal ends it, and what
                  fronts have in flight waits for the next launch of that name
PostedLaunches    rank 0 is the child of a front, and outlives it: a front posts a launch, which ends with the front's
                  order, and the job waits for the next one. It ends with the process to which the job belongs
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from inflight.distributed.joining import OuterJob
from inflight.errors import ConfigurationError
from inflight.executor.rank.leader.leader_socket import LeaderSocket
from inflight.executor.wire.address import EngineAddress, user_directory
from inflight.executor.wire.job import JobFolder, is_served, note_end, take
from inflight.executor.wire.launch import Launch
from inflight.model_config import read_engine_config
from inflight.parent_watch import dying_with

logger = logging.getLogger("inflight.worker")

TOLD_TO_END = "the ranks were told to end"
LEAVE_SECONDS = 5
"""Time that the ranks have to leave the job. After it, rank 0 ends without the others."""


class LaunchSource(Protocol):
    """Used by rank 0 alone, on its main thread."""

    job: JobFolder

    def next_launch(self) -> Launch | None:
        """The next launch, once all ranks have left the last one; None once there will be no more."""

    def has_begun(self, leader: LeaderSocket) -> None:
        """The launch serves: fronts can connect to `leader`."""

    def close(self) -> None:
        """Remove the job's files."""


class OwnLaunch:
    """Implements LaunchSource."""

    def __init__(self, path: Path, overrides: Mapping[str, str], name: str) -> None:
        """`name`: of the engine; "" = the model's. Raises ConfigurationError."""
        own_name, self._config = read_engine_config(path, overrides)
        self._address = EngineAddress.of(name or own_name, user_directory())
        last = self._address.resolve()
        if last is not None and is_served(last):
            raise ConfigurationError(
                f"an engine called {self._address.link.name} serves here already: end its ranks, or give these another "
                "--name"
            )
        self.job = JobFolder(os.getpid())
        self.job.create()
        self._launch: Launch | None = None

    def next_launch(self) -> Launch | None:
        if self._launch is not None:
            return None
        directory = self.job.path / "engine"
        directory.mkdir(mode=0o700)
        self._launch = Launch.of(directory, self._config, OuterJob())
        self._launch.describe()
        return self._launch

    def has_begun(self, leader: LeaderSocket) -> None:
        assert self._launch is not None
        self._address.point_to(self._launch.socket_path)
        # By a thread, because the main one may be waiting in C++ for a rank that is dead, and then runs no handler.
        told, tells = socket.socketpair()
        tells.setblocking(False)
        signal.set_wakeup_fd(tells.detach())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        arguments = (told, self._launch.socket_path, leader)
        threading.Thread(target=self._end_when_told, args=arguments, name="inflight-signals", daemon=True).start()

    def _end_when_told(self, told: socket.socket, socket_path: Path, leader: LeaderSocket) -> None:
        told.recv(1)
        self._address.withdraw(socket_path)  # fronts are to wait for other ranks, and not to find these again
        leader.end(TOLD_TO_END)
        time.sleep(LEAVE_SECONDS)
        logger.error("the other ranks did not leave within %d s", LEAVE_SECONDS)
        self.job.remove()
        os._exit(1)

    def close(self) -> None:
        if self._launch is not None:
            self._address.withdraw(self._launch.socket_path)
        self.job.remove()


class PostedLaunches:
    """Implements LaunchSource."""

    def __init__(self, job_pid: int, mailbox: int) -> None:
        """`job_pid`: of the process to which the job belongs. `mailbox`: the descriptor of JobFolder.open_mailbox."""
        self.job = JobFolder(job_pid)
        self._mailbox = socket.socket(fileno=mailbox)
        self._process = os.pidfd_open(job_pid)
        self._launch: Launch | None = None
        self._watch: AbstractContextManager[None] | None = None

    def next_launch(self) -> Launch | None:
        if self._launch is not None and self._watch is not None:
            self._watch.__exit__(None, None, None)
            note_end(self._launch)
        poll = select.poll()
        for descriptor in (self._mailbox.fileno(), self._process):
            poll.register(descriptor, select.POLLIN)
        ready = dict(poll.poll())
        if self._process in ready:
            signal.alarm(LEAVE_SECONDS)  # a launcher may have killed the others at once
            return None
        self._launch = take(self._mailbox)
        self._watch = dying_with(self._launch.front_pid, self.job.pid)
        self._watch.__enter__()
        return self._launch

    def has_begun(self, leader: LeaderSocket) -> None:
        """Nothing to do: the front publishes the address."""

    def close(self) -> None:
        self.job.remove()
