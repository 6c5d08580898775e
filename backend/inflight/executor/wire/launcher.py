"""What a front needs of whoever starts the ranks: an engine's life, from its start or its finding to its end.

A front drives both from its one thread, so no implementation needs a lock.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol


class EngineLife(Protocol):
    """The ranks of one launch, as a front meets them."""

    socket_path: Path
    """Of the leader; nobody may listen there yet."""

    @property
    def fds(self) -> list[int]:
        """To be polled besides the link: readable as soon as something may have ended."""

    @property
    def has_joined(self) -> bool:
        """True once the ranks have found each other; what follows is loading, which may take long."""

    def serve(self) -> None:
        """The leader has answered: from now on every rank is watched by itself, and others may find the engine."""

    def why_over(self, ready_fds: Collection[object]) -> str:
        """A sentence if this life has come to its end, else empty. `ready_fds`: which are readable now."""

    def wait_for_end(self, seconds: float) -> bool:
        """True if the ranks, which were told to leave, have gone within that time; or if they are not ours to end."""

    def end(self) -> None:
        """End what is left, remove what it left behind. Returns when nothing is left."""


class Launcher(Protocol):
    """Starts ranks, or finds those that others started."""

    owns_ranks: bool
    """True if the ranks live for this front: it ends them with itself and starts them anew when they die."""

    absent: str
    """What to tell where `open` finds no engine."""

    def open(self) -> EngineLife | None:
        """Begin a life. None if there is no engine to be found yet. Raises ConfigurationError or OSError."""

    def pids(self) -> list[int]:
        """Every living process of the engine that this launcher started."""
