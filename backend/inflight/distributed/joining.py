"""How the ranks of a launch join each other: what a launch tells each of them about it, and the RankGroup it makes.

Fronts read it, too, as part of a launch: the library of each way is imported only by the ranks that use it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from inflight.distributed.outer_job import join_outer_job
from inflight.distributed.rank_group import RankGroup, SingleRank
from inflight.errors import ConfigurationError
from inflight.mpi_launcher import misfit

MEETING = "INFLIGHT_MEETING"
"""Environment variable of each rank that holds its AppointedMeeting: a Meeting as JSON."""
MEETING_PLACE = "ranks.sock"
"""Of ranks of one machine, in the launch's directory."""


class OneRank(msgspec.Struct, frozen=True, tag="one_rank"):
    """There is one rank."""


class MpiJob(msgspec.Struct, frozen=True, tag="mpi_job"):
    """The ranks are members of one MPI job, which numbers them."""


class OuterJob(msgspec.Struct, frozen=True, tag="outer_job"):
    """Somebody else started the ranks, in a job that their environment describes."""


class Meeting(msgspec.Struct, frozen=True, kw_only=True, tag="meeting"):
    """The ranks meet at a socket of rank 0; each is told its number when it is started."""

    endpoint: str = ""
    """tcp://ADDRESS:PORT of one interface of rank 0's machine; unset = a socket in the launch's private directory, for
    ranks of one machine."""
    secret: str = ""
    """Of this launch alone, 32 characters or more; only for TCP."""


class AppointedMeeting(msgspec.Struct, frozen=True, tag="appointed_meeting"):
    """A Meeting that is known only once it is known which machines the ranks are on: each rank is told it, too, when it
    is started."""


Joining = OneRank | MpiJob | OuterJob | Meeting | AppointedMeeting
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
        case OuterJob():
            return join_outer_job(os.environ, folder)
        case Meeting():
            return _meet(way, rank, size, folder)
        case AppointedMeeting():
            return _meet(msgspec.json.decode(os.environ[MEETING], type=Meeting), rank, size, folder)


def _join_mpi_job(size: int, folder: Path | None) -> RankGroup:
    from inflight.distributed.mpi import MpiRankGroup, library_version

    group = MpiRankGroup(folder)
    if group.size != size:
        raise ConfigurationError(
            f"{size} ranks were launched but each finds itself in a group of {group.size}: "
            f"{misfit(None, library_version())}"
        )
    return group


def _meet(meeting: Meeting, rank: int | None, size: int, folder: Path | None) -> RankGroup:
    from inflight.distributed.ring_group import RingRankGroup
    from inflight.distributed.sockets import SocketRankGroup

    if rank is None or not 0 <= rank < size:
        raise ConfigurationError(f"{size} ranks were launched and this one was told the number {rank}")
    if size == 1:
        return SingleRank()
    endpoint = meeting.endpoint
    if not endpoint:
        if folder is None:
            raise ConfigurationError("ranks on other machines than their front need a TCP endpoint to meet at")
        endpoint = f"ipc://{folder / MEETING_PLACE}"
    return RingRankGroup(SocketRankGroup(endpoint, rank=rank, size=size, secret=meeting.secret))
