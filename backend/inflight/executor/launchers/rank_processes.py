"""The processes of one launch: started together, watched, and all killed at its end.

Every process with the launch's variable in its environment belongs to it: mpiexec, the ranks, and any processes that
they started. Does not know the messages that ranks and fronts exchange.
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
from inflight.executor.wire.launch import LAUNCH, Launch, RankGroupKind
from inflight.run_directory import run_directory

MAX_PARENT_LENGTH = 70
"""Bytes. The whole address of a UNIX socket may have 107."""

CommandOf = Callable[[Launch], tuple[list[str], Mapping[str, str]]]
"""The command line and the environment that start all ranks of a launch."""


class RankProcesses:
    """The constructor starts them. To be used from one thread, which must outlive the ranks: they are killed when it
    ends."""

    def __init__(self, config: EngineConfig, command_of: CommandOf, rank_group: RankGroupKind) -> None:
        """Raises OSError if the command cannot be run, and whatever `command_of` raises."""
        directory = tempfile.mkdtemp(prefix="engine-", dir=_parent_directory())
        self.launch = Launch.of(Path(directory), config, rank_group)
        self._mark = f"{LAUNCH}={self.launch.to_environment()}".encode()
        self._pidfds: dict[int, int] = {}  # pidfd -> pid
        try:
            self.launch.describe()
            command, environment = command_of(self.launch)
            self._child = subprocess.Popen(
                command,
                # Temporary files that a dying rank leaves behind are removed with the launch's directory.
                env={**environment, LAUNCH: self.launch.to_environment(), "TMPDIR": directory},
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
        """Process id of the command: mpiexec, or the only rank."""
        return self._child.pid

    @property
    def pidfds(self) -> list[int]:
        """One file descriptor for each watched process, readable as soon as the process has ended."""
        return list(self._pidfds)

    def watch_ranks(self) -> None:
        """From now on also watch each rank process on this machine that has joined the other ranks."""
        for pid in self.launch.rank_pids():
            if pid not in self._pidfds.values():
                self._watch(pid)

    def why_ended(self, pidfd: int) -> str:
        """How the process of `pidfd` ended, as a sentence."""
        pid = self._pidfds[pidfd]
        reason = self.launch.failure()
        if pid != self._child.pid:
            return reason or f"rank process {pid} has died"
        code = self._child.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return reason or f"the ranks' process {pid} {how}"

    def pids(self) -> list[int]:
        """Ids of the launch's processes that still run."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if self._mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        found.append(int(name))
        return found

    def wait(self, seconds: float) -> bool:
        """True if the ranks on this machine end by themselves within `seconds`. mpiexec is not waited for."""
        deadline = time.monotonic() + seconds
        ranks = set(self.launch.rank_pids()) or {self._child.pid}
        for pidfd in [pidfd for pidfd, pid in self._pidfds.items() if pid in ranks]:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        return True

    def kill(self) -> None:
        """Kill every process of the launch, even if suspended, and remove its directory. Returns when none is left."""
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
        with contextlib.suppress(ProcessLookupError):  # already ended: a missing heartbeat or mpiexec's exit reveals it
            self._pidfds[os.pidfd_open(pid)] = pid


def _parent_directory() -> str | None:
    """The server's run directory, if there is one and its path is short enough for a socket's address below it."""
    parent = run_directory()
    return str(parent) if parent is not None and len(str(parent)) <= MAX_PARENT_LENGTH else None
