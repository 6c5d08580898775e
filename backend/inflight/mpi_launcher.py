"""The MPI launcher (mpiexec): finding it, its options and environment, and the messages about one that does not work.

An executor launches ranks with it, and `inflight serve` tests it beforehand; both use this file, so that the launcher
that was tested is the one that is used. Does not know the ranks' program; of MPI it knows only how launchers differ.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from inflight.errors import ConfigurationError

OUTER_JOB = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPIEXEC_", "MPIR_", "I_MPI_", "PALS_")
"""Prefixes of environment variables that an outer MPI job sets. Our job must not inherit them: its ranks would take
themselves for members of the outer job."""

LOOPBACK = "lo"
INTERFACE_VARIABLES = (
    # MPICH over UCX and over libfabric, and Open MPI.
    "UCX_NET_DEVICES",
    "FI_TCP_IFACE",
    "FI_SOCKETS_IFACE",
    "OMPI_MCA_btl_tcp_if_include",
    "OMPI_MCA_oob_tcp_if_include",
    "PRTE_MCA_oob_tcp_if_include",
    # Tensor collectives.
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)
"""Environment variables that limit communication to a network interface."""
SHARED_MEMORY = {"UCX_TLS": "self,posix"}
"""MPICH over UCX on one host: no TCP listeners."""

REMEDY = "install mpich and mpi4py in one environment, or put the mpiexec of mpi4py's library first on PATH"


def find_launcher(python: Path, *, one_host: bool) -> Path:
    """The launcher beside the interpreter `python`, where pip puts MPICH's, else the first on PATH.

    On one host MPICH's gforker is preferred to its hydra because it does not listen on a port. Raises
    ConfigurationError.
    """
    names = ("mpiexec.gforker", "mpiexec", "mpirun") if one_host else ("mpiexec", "mpirun")
    for folder in (str(python.parent), None):
        for name in names:
            if found := shutil.which(name, path=folder):
                return Path(found)
    otherwise = ", or set executor to multiproc, which needs none" if one_host else ""
    raise ConfigurationError(f"there is no MPI launcher (mpiexec) here: {REMEDY}{otherwise}")


def launcher_options(
    launcher: Path, hostfile: str = "", exported: Sequence[str] = (), interface: str = ""
) -> list[str]:
    """Options of this kind of launcher. Ranks are not bound to cores, because the runner places their threads.

    `exported`: names of environment variables that ranks on the hosts of `hostfile` need. `interface`: by which these
    hosts communicate. Raises ConfigurationError.
    """
    if launcher.name.endswith("gforker"):
        return []
    try:
        shown = subprocess.run([str(launcher), "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"the MPI launcher {launcher} cannot be run ({error}): {REMEDY}") from None
    version = shown.stdout + shown.stderr
    if "HYDRA" in version:
        there = ["-f", hostfile] if hostfile else ["-launcher", "fork", "-rmk", "user"]
        return ["-bind-to", "none", *there, *(["-iface", interface] if interface else [])]
    if any(name in version for name in ("Open MPI", "OpenRTE", "PRTE", "prterun")):
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        exported = (*exported, *(INTERFACE_VARIABLES if interface else ()))
        there = ["--hostfile", hostfile, *(word for name in exported for word in ("-x", name))] if hostfile else []
        return [*root, "--oversubscribe", "--bind-to", "none", *there]
    return ["-f", hostfile] if hostfile else []


def launcher_environment(inherited: Mapping[str, str], *, one_host: bool, interface: str = "") -> dict[str, str]:
    """`inherited` without the variables of an outer MPI job; communication is limited to this host with `one_host`,
    else to the network `interface`, if one is given."""
    own = {name: value for name, value in inherited.items() if not name.startswith(OUTER_JOB)}
    limits = dict.fromkeys(INTERFACE_VARIABLES, LOOPBACK if one_host else interface)
    return {**own, **(limits if one_host or interface else {}), **(SHARED_MEMORY if one_host else {})}


def misfit(launcher: Path | None, library: str = "") -> str:
    """Message for a launcher whose ranks do not find each other. `library`: version text of mpi4py's MPI library."""
    named = f" {launcher}" if launcher else ""
    known = f" ({library})" if library else ""
    return f"the MPI launcher{named} does not belong to mpi4py's MPI library{known}: {REMEDY}"
