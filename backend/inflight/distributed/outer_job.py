"""The job in which somebody else started this process (`mpiexec`, `torchrun`, `srun`), as its environment tells.

    mpiexec, mpirun, srun --mpi=…    the MPI library knows the other ranks
    torchrun                         RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and torchrun's store behind that port
    srun without MPI                 SLURM_PROCID, SLURM_NTASKS; MASTER_ADDR and MASTER_PORT from whoever submits

Only these variables are read; nothing of an engine is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inflight.distributed.rank_group import RankGroup, SingleRank
from inflight.errors import ConfigurationError

MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE")
MPI_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
"""Variables of MPI launchers, each with the number of processes or this one's number. PMIx tells the first only through
its library, but the launchers of Open MPI set their own besides; slurmstepd sets none."""


@dataclass(frozen=True)
class Membership:
    """What the environment says of the job."""

    is_mpi: bool
    size: int
    """0 if only the MPI library knows it."""
    rank: int


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks without MPI find each other."""

    rank: int
    size: int
    host: str
    port: int
    is_served: bool
    """Whether a store answers there already, torchrun's; otherwise rank 0 opens one."""
    prefix: str
    """Of the store's keys: another one in every attempt, as a restarted job finds the keys of its last one."""


def find_outer_job(environment: Mapping[str, str]) -> Membership | None:
    """None if this process was started alone. Raises ConfigurationError."""
    rank = next((int(environment[name]) for name in MPI_RANKS if environment.get(name, "").isdigit()), None)
    if rank is not None:
        sizes = [int(environment[name]) for name in MPI_SIZES if environment.get(name, "").isdigit()]
        return Membership(is_mpi=True, size=sizes[0] if sizes else _slurm_size(environment), rank=rank)
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        return Membership(is_mpi=False, size=_number(environment, "WORLD_SIZE"), rank=_number(environment, "RANK"))
    if "SLURM_PROCID" in environment:
        return Membership(is_mpi=False, size=_slurm_size(environment), rank=_number(environment, "SLURM_PROCID"))
    return None


def join_outer_job(environment: Mapping[str, str], folder: Path | None = None) -> RankGroup:
    """Join the other ranks of the job; alone, a group of one. Collective. `folder`: on rank 0, a private directory that
    is there as long as the ranks are. Raises ConfigurationError."""
    job = find_outer_job(environment)
    if job is None or job.size == 1:
        return SingleRank()
    if job.is_mpi:
        from inflight.distributed.mpi import MpiRankGroup

        return MpiRankGroup(folder)
    from inflight.distributed.store_meeting import meet

    return meet(_rendezvous(job, environment))


def _rendezvous(job: Membership, environment: Mapping[str, str]) -> Rendezvous:
    if not environment.get("MASTER_ADDR") or not environment.get("MASTER_PORT"):
        raise ConfigurationError(
            f"rank {job.rank} of {job.size} does not know where to find the others: export MASTER_ADDR and MASTER_PORT "
            "(an address of the first rank's machine, and a free port there), or start the ranks with mpiexec, "
            "torchrun or srun --mpi"
        )
    return Rendezvous(
        rank=job.rank,
        size=job.size,
        host=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
        is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        prefix=f"inflight/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _slurm_size(environment: Mapping[str, str]) -> int:
    """Of the job's step, which may have fewer tasks than the job."""
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if name in environment:
            return _number(environment, name)
    return 0


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdigit():
        raise ConfigurationError(f"the environment variable {name} must be a number, got {text!r}")
    return int(text)
