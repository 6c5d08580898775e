"""The processes of one launch: started together, watched, and ended to the last.

Every process that carries the launch's mark in its environment belongs to it: the launcher, the ranks, and what they
started. Knows nothing of what they say.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from inflight.config import EngineConfig
from inflight.executor.wire.launch import LAUNCH, Launch
from inflight.run_directory import run_directory

MAX_PARENT_LENGTH = 70
"""A UNIX socket's whole address takes 107 bytes."""

CommandOf = Callable[[Launch], tuple[list[str], Mapping[str, str]]]
"""The command line and the environment that start all ranks of a launch."""


class RankProcesses:
    """Started by the constructor. To be used from one thread, which must outlive the ranks: they end with it."""

    def __init__(self, config: EngineConfig, command_of: CommandOf) -> None:
        """Raises OSError if the command cannot be run, and what `command_of` does."""
        directory = tempfile.mkdtemp(prefix="engine-", dir=_parent_directory())
        self.launch = Launch.of(Path(directory), config)
        self._mark = f"{LAUNCH}={self.launch.to_environment()}".encode()
        self._pidfds: dict[int, int] = {}  # pidfd -> pid
        try:
            command, environment = command_of(self.launch)
            self._child = subprocess.Popen(
                command,
                env={**environment, LAUNCH: self.launch.to_environment()},
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._watch(self._child.pid)

    @property
    def pid(self) -> int:
        """Of the process that was started: the launcher, or the only rank."""
        return self._child.pid

    @property
    def pidfds(self) -> list[int]:
        """Readable as soon as one of the watched processes has ended."""
        return list(self._pidfds)

    def watch_ranks(self) -> None:
        """From now on also watch every rank of this machine by itself. Call it when they have met."""
        for pid in self.launch.rank_pids():
            if pid not in self._pidfds.values():
                self._watch(pid)

    def why_ended(self, pidfd: int) -> str:
        """A sentence for the log about the process whose pidfd became readable."""
        pid = self._pidfds[pidfd]
        reason = self.launch.failure()
        if pid != self._child.pid:
            return reason or f"rank process {pid} has died"
        code = self._child.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return reason or f"the ranks' process {pid} {how}"

    def pids(self) -> list[int]:
        """Living processes of the launch."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if self._mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        found.append(int(name))
        return found

    def wait(self, seconds: float) -> bool:
        """Did the ranks of this machine end by themselves within `seconds`? Their launcher may take its time."""
        deadline = time.monotonic() + seconds
        ranks = set(self.launch.rank_pids()) or {self._child.pid}
        for pidfd in [pidfd for pidfd, pid in self._pidfds.items() if pid in ranks]:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        return True

    def kill(self) -> None:
        """End every process of the launch, also stopped ones, and remove its directory. Returns when none is left."""
        if self._child.poll() is None:
            self._child.kill()
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        self._child.wait()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()
        shutil.rmtree(self.launch.directory, ignore_errors=True)

    def _watch(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # already gone: the heartbeat or its launcher will tell
            self._pidfds[os.pidfd_open(pid)] = pid


def _parent_directory() -> str | None:
    """The server's run directory, if there is one whose name leaves room for ours in a socket's address."""
    parent = run_directory()
    return str(parent) if parent is not None and len(str(parent)) <= MAX_PARENT_LENGTH else None
