"""Attaches to an engine that another front launched: found by its address, and found again after a relaunch.

Starts no processes and ends none.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.wire.address import EngineAddress
from inflight.executor.wire.launch import Launch

FIND_SECONDS = 0.2
"""Interval between attempts to find an engine that is being launched."""


class AttachedLauncher:
    """Implements wire.launcher.Launcher."""

    owns_ranks = False

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self.absent = f"no engine called {address.link.name!r} serves here"

    def open(self) -> AttachedLaunch | None:
        socket_path = self._address.resolve()
        return AttachedLaunch(self._address, socket_path) if socket_path is not None else None

    def pids(self) -> list[int]:
        return []


def find_engine(address: EngineAddress, seconds: float) -> EngineConfig:
    """The configuration of the engine one of whose replicas serves at `address` or beside it, or will do so within
    `seconds`.

    Raises ConfigurationError if there is none by then.
    """
    deadline = time.monotonic() + seconds
    while True:
        for replica in address.of_all_replicas():
            socket_path = replica.resolve()
            launch = Launch.beside(socket_path) if socket_path is not None else None
            if launch is not None:
                return launch.config
        if time.monotonic() >= deadline:
            raise ConfigurationError(AttachedLauncher(address).absent)
        time.sleep(FIND_SECONDS)


class AttachedLaunch:
    """Implements wire.launcher.RunningLaunch: one launch by another front."""

    has_joined = True
    is_misconfigured = False

    def __init__(self, address: EngineAddress, socket_path: Path) -> None:
        self._address = address
        self.socket_path = socket_path

    def fds(self) -> list[int]:
        return []

    def publish(self) -> None:
        """Nothing to do: the front that launched the ranks watches them and has set the address."""

    def end_reason(self, ready_fds: Collection[object]) -> str:
        return "" if self._address.resolve() == self.socket_path else "the engine's launch has ended"

    def wait_for_end(self, seconds: float) -> bool:
        return True

    def end(self) -> None:
        """Nothing to do: the ranks keep running."""
