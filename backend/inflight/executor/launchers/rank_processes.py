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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from inflight.config import EngineConfig
from inflight.distributed.joining import Joining
from inflight.executor.launchers.fork_server import ForkServer
from inflight.executor.wire.launch import LAUNCH, RANK, Launch
from inflight.run_directory import run_directory

MAX_PARENT_LENGTH = 70
"""Bytes. The whole address of a UNIX socket may have 107."""


@dataclass(frozen=True, slots=True)
class Command:
    """What starts one process of a launch."""

    arguments: list[str]
    environment: Mapping[str, str]
    rank: int | None = None
    """The number of the rank that the process is; None if ranks learn theirs in another way."""


class Child(Protocol):
    """A process that was started for a launch; a subprocess.Popen is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class RankProcesses:
    """The constructor starts them. To be used from one thread, which must outlive the ranks: they are killed when it
    ends."""

    def __init__(
        self,
        config: EngineConfig,
        commands_of: Callable[[Launch], list[Command]],
        joining: Joining,
        *,
        weights: Sequence[str] = (),
        is_relaunch: bool = False,
        fork_server: ForkServer | None = None,
    ) -> None:
        """For `weights` and `is_relaunch` see Launch. `fork_server`: what ranks are forked from, which is ready; None =
        they are started. Raises OSError if a command cannot be run, and whatever `commands_of` raises."""
        directory = tempfile.mkdtemp(prefix="engine-", dir=_parent_directory())
        self.launch = Launch.of(Path(directory), config, joining, weights=weights, is_relaunch=is_relaunch)
        self._mark = f"{LAUNCH}={self.launch.to_environment()}".encode()
        self._pidfds: dict[int, int] = {}  # pidfd -> pid
        self._children: dict[int, Child] = {}  # by pid
        self._fork_server = fork_server
        try:
            self.launch.describe()
            for command in commands_of(self.launch):
                self._start(command)
        except BaseException:
            self.kill()
            raise

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
        if pid not in self._children:
            return reason or f"rank process {pid} has died"
        code = self._children[pid].wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return reason or f"the ranks' process {pid} {how}"

    def pids(self) -> list[int]:
        """Ids of the launch's processes that still run."""
        # Those just started may not show their variables yet.
        found = {pid for pid, child in list(self._children.items()) if child.poll() is None}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if self._mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        found.add(int(name))
        return sorted(found)

    def wait(self, seconds: float) -> bool:
        """True if the ranks on this machine end by themselves within `seconds`. mpiexec is not waited for."""
        deadline = time.monotonic() + seconds
        ranks = set(self.launch.rank_pids()) or self._children.keys()
        for pidfd in [pidfd for pidfd, pid in self._pidfds.items() if pid in ranks]:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        return True

    def kill(self) -> None:
        """Kill every process of the launch, even if suspended, and remove its directory. Returns when none is left."""
        for child in self._children.values():
            if child.poll() is None:
                child.kill()
        # The search below opens files, one at a time: in a process that is out of descriptors these make room for it.
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        for child in self._children.values():
            child.wait()
        shutil.rmtree(self.launch.directory, ignore_errors=True)

    def _start(self, command: Command) -> None:
        environment = {
            **command.environment,
            LAUNCH: self.launch.to_environment(),
            RANK: "" if command.rank is None else str(command.rank),
            # Temporary files that a dying rank leaves behind are removed with the launch's directory.
            "TMPDIR": self.launch.directory,
        }
        if self._fork_server is not None:
            child: Child = self._fork_server.fork(environment)
        else:
            child = _start_process(command.arguments, environment)
        self._children[child.pid] = child
        self._watch(child.pid)

    def _watch(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # already ended: a missing heartbeat or mpiexec's exit reveals it
            self._pidfds[os.pidfd_open(pid)] = pid


def _start_process(arguments: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)


def _parent_directory() -> str | None:
    """The server's run directory, if there is one and its path is short enough for a socket's address below it."""
    parent = run_directory()
    return str(parent) if parent is not None and len(str(parent)) <= MAX_PARENT_LENGTH else None
