"""A Launcher for ranks that are started by commands: by one for all of them, or by one for each.

A LaunchCommand (`uniproc`, `mpi`, `multiproc`) supplies the command lines, their environments, how the ranks join each
other, and the error message for ranks that did not. Starting, watching and ending the processes is the same for all.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from inflight.config import EngineConfig
from inflight.distributed.joining import Joining
from inflight.executor.launchers.fork_server import ForkServer
from inflight.executor.launchers.rank_processes import Command, RankProcesses
from inflight.executor.launchers.stopped_processes import StoppedProcesses
from inflight.executor.launchers.weight_holder import WeightHolder
from inflight.executor.wire.address import EngineAddress
from inflight.executor.wire.launch import Launch
from inflight.executor.wire.launcher import FIND_SECONDS


class LaunchCommand(Protocol):
    """What starts all ranks of a launch."""

    @property
    def may_fork(self) -> bool:
        """Whether each command starts one rank, as `python -m inflight.worker`, which may as well be forked."""

    @property
    def joining(self) -> Joining:
        """How these ranks join each other."""

    def commands(self, launch: Launch) -> list[Command]:
        """One command that starts all ranks, or one for each rank in their order. Raises ConfigurationError."""

    def explain(self, reason: str) -> str:
        """Error message for ranks that ended before they found each other; `reason` says how they ended."""


class ProcessLauncher:
    """Implements wire.launcher.Launcher."""

    owns_ranks = True
    starts_processes = True
    num_spares = 0
    absent = "the process that the engine's ranks are forked from did not become ready"

    def __init__(
        self,
        config: EngineConfig,
        command: LaunchCommand,
        address: EngineAddress | None = None,
        weights: WeightHolder | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        """`address`: where other fronts find the engine; None = no other front can. `weights`: what holds those of all
        launches of the engine; None = of this launcher's. `fork_server`: what all launches of the replica fork their
        ranks from; None = they start them."""
        self._config = config
        self._command = command
        self._address = address
        self._weights = weights or WeightHolder(config)
        self._fork_server = fork_server
        self._launch: ProcessLaunch | None = None

    def open(self) -> ProcessLaunch | None:
        """None while the process that ranks are forked from is not ready."""
        if self._fork_server is not None and not self._fork_server.is_ready(FIND_SECONDS):
            return None
        processes = RankProcesses(
            self._config,
            self._command.commands,
            self._command.joining,
            weights=self._weights.places(),
            is_relaunch=self._launch is not None and self._launch.has_served,
            fork_server=self._fork_server,
        )
        heartbeat_seconds = self._config.worker_heartbeat_timeout_ms / 1000
        self._launch = ProcessLaunch(processes, self._command, self._address, self._weights, heartbeat_seconds)
        return self._launch

    def pids(self) -> list[int]:
        return self._launch.processes.pids() if self._launch is not None else []

    def end_spares(self) -> None:
        """There are none."""

    def close(self) -> None:
        self._weights.close()
        if self._fork_server is not None:
            self._fork_server.close()


class ProcessLaunch:
    """Implements wire.launcher.RunningLaunch: the processes of one launch."""

    def __init__(
        self,
        processes: RankProcesses,
        command: LaunchCommand,
        address: EngineAddress | None,
        weights: WeightHolder,
        heartbeat_seconds: float,
    ) -> None:
        self.processes = processes
        self._command = command
        self._address = address
        self._weights = weights
        self._is_published = False
        self._stopped = StoppedProcesses(processes.launch.rank_pids, heartbeat_seconds)
        self.socket_path: Path = processes.launch.socket_path

    def fds(self) -> list[int]:
        """See RunningLaunch. The ranks are watched as well as mpiexec, which may notice a dead rank late and then exit
        with code 0."""
        self.processes.watch_ranks()
        return self.processes.pidfds

    @property
    def has_joined(self) -> bool:
        return self._is_published or bool(self.processes.launch.rank_pids())

    @property
    def has_served(self) -> bool:
        return self._is_published

    def publish(self) -> None:
        self._is_published = True
        if self._address is not None:
            self._address.point_to(self.socket_path)

    def end_reason(self, ready_fds: Collection[object]) -> str:
        launch = self.processes.launch
        failure = "" if self._is_published else launch.failure()
        ended = [pidfd for pidfd in self.processes.pidfds if pidfd in ready_fds]
        if ended and not failure:
            why = self.processes.why_ended(ended[-1])  # of a rank rather than of mpiexec, which is watched first
            return why if launch.failure() or launch.rank_pids() else self._command.explain(why)
        if not failure and (pid := self._stopped.look()) is not None:
            return f"rank process {pid} has been stopped by a signal for {self._stopped.patience:.1f} s"
        return failure

    @property
    def is_misconfigured(self) -> bool:
        return self.processes.launch.is_misconfigured()

    def wait_for_end(self, seconds: float) -> bool:
        return self.processes.wait(seconds)

    def end(self) -> None:
        if self._address is not None:
            self._address.withdraw(self.socket_path)
        if self.processes.launch.has_unusable_weights():
            self._weights.close()  # the next launch reads them anew
        self.processes.kill()
