"""The interface between an engine's ranks: broadcasts of bytes from the leader. Knows no requests and no tensors."""

from __future__ import annotations

from typing import Protocol


class RankGroup(Protocol):
    """All ranks of one engine. Rank 0 is the leader. Calls are collective: every rank makes them in the same order."""

    rank: int
    size: int
    several_hosts: bool
    """Whether ranks are on different machines: then they share no memory."""

    def broadcast(self, payload: bytes | None) -> bytes:
        """Returns the leader's payload on every rank; followers pass None. A waiting follower must not busy-wait."""

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def close(self) -> None:
        """Leave the group."""

    def abort(self) -> None:
        """End every rank, possibly this one too. For a rank that failed and would leave the others waiting."""


class SingleRank:
    """A group of one rank, without communication."""

    rank = 0
    size = 1
    several_hosts = False

    def broadcast(self, payload: bytes | None) -> bytes:
        assert payload is not None
        return payload

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None

    def abort(self) -> None:
        return None
