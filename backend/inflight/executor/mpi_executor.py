"""Ranks under an MPI launcher: `mpiexec -n N python -m inflight.worker`, a job of its own.

The front is no member of the job, so that no abort can reach it. On one machine everything stays inside it: ranks talk
through shared memory. With a hostfile the launcher's own defaults hold, and the network must be a trusted one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from inflight.config import EngineConfig
from inflight.executor.launch import LAUNCH, Launch
from inflight.executor.process_executor import ProcessExecutor
from inflight.executor.python_command import WORKER, find_python, worker_environment
from inflight.mpi_launcher import find_launcher, launcher_environment, launcher_options, misfit


class MpiExecutor(ProcessExecutor):
    """The executor for several ranks."""

    program = tuple(WORKER)
    """Arguments of the interpreter; a test puts its own program here."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        mpiexec: Path | None = None,
        auto_relaunch: bool = True,
        on_engine_death: Callable[[str], None] | None = None,
    ) -> None:
        """`mpiexec`: the launcher, if not the one of this environment or of PATH."""
        super().__init__(config, auto_relaunch=auto_relaunch, on_engine_death=on_engine_death)
        self._mpiexec = mpiexec

    def _command(self, launch: Launch) -> tuple[list[str], Mapping[str, str]]:
        hostfile = self._config.mpi_hostfile
        launcher = self._find_launcher()
        options = launcher_options(launcher, hostfile, exported=(LAUNCH, "PYTHONPATH"))
        size = str(self._config.tensor_parallel_size)
        environment = launcher_environment(worker_environment(os.environ), one_host=not hostfile)
        return [str(launcher), *options, "-n", size, str(find_python()), *self.program], environment

    def _explain(self, reason: str) -> str:
        size = self._config.tensor_parallel_size
        return f"the {size} ranks did not find each other ({reason}): most likely {misfit(self._find_launcher())}"

    def _find_launcher(self) -> Path:
        return self._mpiexec or find_launcher(find_python(), one_host=not self._config.mpi_hostfile)
