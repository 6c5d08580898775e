"""Attaches to an engine that another front launched: found by its address, and found again after a relaunch.

Starts no processes and ends none.
"""

from __future__ import annotations

import select
import time
from collections.abc import Collection
from pathlib import Path

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.launchers.found_ranks import FoundRanks
from inflight.executor.wire.address import EngineAddress
from inflight.executor.wire.launch import Launch
from inflight.executor.wire.launcher import FIND_SECONDS


class AttachedLauncher:
    """Implements wire.launcher.Launcher."""

    owns_ranks = False
    starts_processes = False
    num_spares = 0

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self.absent = f"no engine called {address.link.name!r} serves here"

    def open(self) -> AttachedLaunch | None:
        """Not ranks that have ended, to which an address still points whose front was killed."""
        socket_path = self._address.resolve()
        if socket_path is None:
            return None
        launch = AttachedLaunch(self._address, socket_path)
        if launch.end_reason(launch.ready_fds()):
            launch.end()
            return None
        return launch

    def pids(self) -> list[int]:
        return []

    def end_spares(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing to do: it has started nothing."""


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
    """Implements wire.launcher.RunningLaunch: one launch by another front.

    Its processes are watched, where they run on this machine: the front that launched them may have died with them."""

    has_joined = True
    is_misconfigured = False

    def __init__(self, address: EngineAddress, socket_path: Path) -> None:
        self._address = address
        self.socket_path = socket_path
        launch = Launch.beside(socket_path)
        self._ranks = FoundRanks(launch.rank_pids() if launch is not None and launch.on_fronts_host else [])

    def fds(self) -> list[int]:
        return self._ranks.fds()

    def publish(self) -> None:
        """Nothing to do: the front that launched the ranks watches them and has set the address."""

    def ready_fds(self) -> set[int]:
        """Of `fds` those that are readable now."""
        poll = select.poll()
        for fd in self.fds():
            poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(0)}

    def end_reason(self, ready_fds: Collection[object]) -> str:
        has_ended = self._ranks.has_ended(ready_fds) or self._address.resolve() != self.socket_path
        return "the engine's launch has ended" if has_ended else ""

    def wait_for_end(self, seconds: float) -> bool:
        return True

    def end(self) -> None:
        """The ranks keep running."""
        self._ranks.release()
