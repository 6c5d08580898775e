"""How the ranks of a launch join each other: what a launch tells each of them about it, and the RankGroup it makes.

Fronts read it, too, as part of a launch: the library of each way is imported only by the ranks that use it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from inflight.distributed.rank_group import RankGroup, SingleRank
from inflight.errors import ConfigurationError
from inflight.mpi_launcher import misfit


class OneRank(msgspec.Struct, frozen=True, tag="one_rank"):
    """There is one rank."""


class MpiJob(msgspec.Struct, frozen=True, tag="mpi_job"):
    """The ranks are members of one MPI job, which numbers them."""


Joining = OneRank | MpiJob
"""One of the ways."""


def join(way: Joining, *, rank: int | None, size: int, folder: Path | None) -> RankGroup:
    """Join the other ranks. Collective.

    `rank`: this rank's number, if its launcher knows it. `size`: how many ranks there must be. `folder`: the launch's
    private directory; None on machines that lack it. Raises ConfigurationError if the ranks do not find each other.
    """
    match way:
        case OneRank():
            return SingleRank()
        case MpiJob():
            return _join_mpi_job(size, folder)


def _join_mpi_job(size: int, folder: Path | None) -> RankGroup:
    from inflight.distributed.mpi import MpiRankGroup, library_version

    group = MpiRankGroup(folder)
    if group.size != size:
        raise ConfigurationError(
            f"{size} ranks were launched but each finds itself in a group of {group.size}: "
            f"{misfit(None, library_version())}"
        )
    return group
