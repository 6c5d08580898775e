"""The seam between ranks: how bytes that the leader has reach every rank. Knows no request and no tensor."""

from __future__ import annotations

from typing import Protocol


class RankGroup(Protocol):
    """All ranks of one engine. Rank 0 is the leader. Calls are collective: every rank makes them in the same order."""

    rank: int
    size: int

    def broadcast(self, payload: bytes | None) -> bytes:
        """The leader's payload, on every rank; followers pass None. A waiting follower must not burn its core."""

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def close(self) -> None:
        """Leave the group."""

    def abort(self) -> None:
        """End every rank, this one too if need be: for a rank that cannot go on with the others."""


class SingleRank:
    """A group of one: nothing to say to anybody."""

    rank = 0
    size = 1

    def broadcast(self, payload: bytes | None) -> bytes:
        assert payload is not None
        return payload

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None

    def abort(self) -> None:
        return None
