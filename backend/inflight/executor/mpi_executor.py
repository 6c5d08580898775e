"""Ranks under an MPI launcher: `mpiexec -n N python -m inflight.worker`, a job of its own.

The front is no member of the job, so that no abort can reach it. On one machine everything stays inside it: ranks talk
through shared memory, and MPICH's gforker is preferred to its hydra because it does not listen on a port.
With a hostfile the launcher's own defaults hold, and the network must be a trusted one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.launch import LAUNCH, Launch
from inflight.executor.process_executor import ProcessExecutor
from inflight.executor.python_command import WORKER, find_python, worker_environment

LAUNCHER_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPIEXEC_", "MPIR_", "I_MPI_", "PALS_")
"""What an outer MPI job leaves in its processes; it would make ours believe that they belong to that job."""

ONE_HOST = {
    # MPICH over UCX: no TCP listeners.
    "UCX_TLS": "self,posix",
    # MPICH over libfabric, and Open MPI.
    "FI_TCP_IFACE": "lo",
    "FI_SOCKETS_IFACE": "lo",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "PRTE_MCA_oob_tcp_if_include": "lo",
    # Tensor collectives.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


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
        python = find_python()
        launcher = self._mpiexec or find_launcher(python, one_host=not hostfile)
        environment = {
            key: value
            for key, value in worker_environment(os.environ).items()
            if not key.startswith(LAUNCHER_VARIABLES)
        }
        if not hostfile:
            environment.update(ONE_HOST)
        options = launcher_options(launcher, hostfile)
        size = str(self._config.tensor_parallel_size)
        return [str(launcher), *options, "-n", size, str(python), *self.program], environment

    def _explain(self, reason: str) -> str:
        launcher = self._mpiexec or find_launcher(find_python(), one_host=not self._config.mpi_hostfile)
        return (
            f"the {self._config.tensor_parallel_size} ranks did not find each other ({reason}): does the MPI launcher "
            f"{launcher} belong to mpi4py's MPI library? "
            "Install mpich and mpi4py in one environment, or put the right mpiexec first on PATH"
        )


def find_launcher(python: Path, one_host: bool) -> Path:
    """The launcher beside `python`, where pip puts MPICH's, else the first on PATH. Raises ConfigurationError."""
    names = ("mpiexec.gforker", "mpiexec", "mpirun") if one_host else ("mpiexec", "mpirun")
    for folder in (str(python.parent), None):
        for name in names:
            if found := shutil.which(name, path=folder):
                return Path(found)
    raise ConfigurationError("no mpiexec found: pip install mpich mpi4py, or put an MPI's mpiexec on PATH")


def launcher_options(launcher: Path, hostfile: str) -> list[str]:
    """Options of this kind of launcher: ranks are bound to no core, as their threads are spread by the runner."""
    if launcher.name.endswith("gforker"):
        return []
    try:
        shown = subprocess.run([str(launcher), "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"the MPI launcher {launcher} cannot be run: {error}") from None
    version = shown.stdout + shown.stderr
    if "HYDRA" in version:
        return ["-bind-to", "none", *(["-f", hostfile] if hostfile else ["-launcher", "fork", "-rmk", "user"])]
    if any(name in version for name in ("Open MPI", "OpenRTE", "PRTE", "prterun")):
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        where = ["--hostfile", hostfile, "-x", LAUNCH, "-x", "PYTHONPATH"] if hostfile else []
        return [*root, "--oversubscribe", "--bind-to", "none", *where]
    return ["-f", hostfile] if hostfile else []
