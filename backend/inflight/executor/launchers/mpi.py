"""Ranks under an MPI launcher: `mpiexec -n N python -m inflight.worker`, as an MPI job of their own.

The front is not a member of the job, so that an MPI abort does not end it. On one machine the ranks communicate through
shared memory and nothing uses the network. With a hostfile the launcher's own defaults apply, and the network must be
trusted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from inflight.config import EngineConfig
from inflight.distributed.joining import MpiJob
from inflight.errors import ConfigurationError
from inflight.executor.launchers.rank_processes import Command
from inflight.executor.wire.launch import LAUNCH, Launch
from inflight.mpi_launcher import find_launcher, launcher_environment, launcher_options, misfit
from inflight.python_command import WORKER, find_python, worker_environment


class Mpi:
    """Implements LaunchCommand, for any number of ranks."""

    joining = MpiJob()
    may_fork = False

    def __init__(self, config: EngineConfig, *, mpiexec: Path | None = None, program: Sequence[str] = WORKER) -> None:
        """`mpiexec`: the MPI launcher; None = the one of this environment or of PATH. `program`: arguments of the
        Python interpreter. Raises ConfigurationError for a hostfile or a network interface that is not there."""
        if config.mpi_hostfile and not Path(config.mpi_hostfile).is_file():
            raise ConfigurationError(f"mpi_hostfile: there is no file {config.mpi_hostfile}; give the path of one")
        interfaces = [name for _, name in socket.if_nameindex()]
        if config.mpi_interface and config.mpi_interface not in interfaces:
            raise ConfigurationError(
                f"mpi_interface: this machine has no network interface {config.mpi_interface}; it has "
                f"{', '.join(interfaces)}"
            )
        self._hostfile = config.mpi_hostfile
        self._interface = config.mpi_interface
        self._size = config.num_replica_ranks
        self._mpiexec = mpiexec
        self._program = program

    def commands(self, launch: Launch) -> list[Command]:
        launcher = self._find_launcher()
        options = launcher_options(launcher, self._hostfile, (LAUNCH, "PYTHONPATH"), self._interface)
        environment = launcher_environment(
            worker_environment(os.environ), one_host=not self._hostfile, interface=self._interface
        )
        arguments = [str(launcher), *options, "-n", str(self._size), str(find_python()), *self._program]
        return [Command(arguments, environment)]

    def explain(self, reason: str) -> str:
        misfits = misfit(self._find_launcher())
        return f"the {self._size} ranks did not find each other ({reason}): most likely {misfits}"

    def _find_launcher(self) -> Path:
        return self._mpiexec or find_launcher(find_python(), one_host=not self._hostfile)
