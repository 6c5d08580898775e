"""The interface between a front and the code that starts ranks: a Launcher, and one launch of it, a RunningLaunch.

A front uses both from a single thread, so no implementation needs a lock.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

FIND_SECONDS = 0.2
"""Interval between attempts to find an engine that another front, or somebody else, has not launched yet."""

LOOKS_PER_SECOND = 2
"""At a launch that runs."""


class RunningLaunch(Protocol):
    """The ranks of one launch as a front sees them, from the moment it starts or finds them to their end."""

    socket_path: Path
    """Of the leader, which may not listen there yet."""

    def fds(self) -> list[int]:
        """File descriptors to poll besides the link, one per process known by now: readable once that process ends."""

    @property
    def has_joined(self) -> bool:
        """True once the ranks have found each other. After that they load the model, which may take long."""

    def publish(self) -> None:
        """Called when the leader has answered: from now on other fronts can find the engine by its address."""

    def end_reason(self, ready_fds: Collection[object]) -> str:
        """Why this launch has ended, as a sentence; empty while it runs. `ready_fds`: those of `fds` readable now. To
        be called LOOKS_PER_SECOND times a second or more often."""

    @property
    def is_misconfigured(self) -> bool:
        """True if a rank has ended because of the configuration or the checkpoint, as those of another launch would."""

    def wait_for_end(self, seconds: float) -> bool:
        """True if the ranks, which were told to end, do so within that time, or if this launcher does not own them."""

    def end(self) -> None:
        """Kill the processes that still run and remove the launch's files. Returns when none is left."""


class Launcher(Protocol):
    """Starts ranks, or finds those that others started."""

    owns_ranks: bool
    """True if the ranks belong to this front: it ends them when it shuts down and relaunches them when they die."""

    starts_processes: bool
    """True if each launch is processes of its own, whose end harms nothing else also while they load."""

    absent: str
    """Error message for the case that `open` returns None."""

    @property
    def num_spares(self) -> int:
        """Loaded sets of ranks that wait to be opened. Read from any thread."""

    def open(self) -> RunningLaunch | None:
        """Start or find a launch. None if there is no engine to find yet. Raises ConfigurationError or OSError."""

    def pids(self) -> list[int]:
        """Ids of the running processes of the engine that this launcher started, without those of spares."""

    def end_spares(self) -> None:
        """The front replaces its ranks: end what waits to take over, as it has loaded what is to be replaced."""

    def close(self) -> None:
        """The front ends: end what this launcher has started besides the launches that were opened, and give back what
        it holds."""
