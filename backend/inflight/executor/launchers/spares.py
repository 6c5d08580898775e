"""Loaded ranks that wait to take the place of ranks that die: a Launcher over others.

A spare is a whole launch, all ranks of the engine with their weights. Nobody knows its leader's socket, so its ranks
sleep. When a front opens its next launch it gets a spare, and the address by which other fronts find the engine follows
as after any launch. While a launch serves, missing spares are started one after the other, at a lower priority where
the system allows it to be raised again, and those that end are replaced after a pause.

All of it happens on the front's thread, when it looks after the launch that serves: ranks are killed when the thread
that has started them ends.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Collection
from pathlib import Path

from inflight.backoff import Backoff
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.launchers.priority import can_restore_priority, lower_priority, restore_priority
from inflight.executor.wire.launcher import Launcher, RunningLaunch

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""How often spares are looked after."""
SETTLE_SECONDS = 1.0
"""Time that ranks serve before the next spare is started: first of all they go on with what has waited for them."""


class SpareLauncher:
    """Implements wire.launcher.Launcher."""

    owns_ranks = True

    def __init__(self, config: EngineConfig, make: Callable[[], Launcher]) -> None:
        """`make`: a launcher for one launch, whose ranks are the front's own."""
        self._config = config
        self._make = make
        self._serving = make()
        self.starts_processes = self._serving.starts_processes
        self.absent = self._serving.absent
        self._spares: list[Spare] = []
        self._backoff = Backoff()
        self._next_look = self._next_start = 0.0
        self._is_nice = can_restore_priority()

    @property
    def num_spares(self) -> int:
        return sum(spare.is_loaded for spare in self._spares)

    def open(self) -> LaunchWithSpares | None:
        """A loaded spare, else one that is still loading, else a new launch."""
        for spare in sorted(self._spares, key=lambda spare: not spare.is_loaded):
            self._spares.remove(spare)
            if reason := spare.end_reason():
                self._discard(spare, reason)
                continue
            silence = None
            if spare.is_loaded:
                silence = self._config.worker_heartbeat_timeout_ms / 1000
            else:
                restore_priority(spare.pids())
            self._serving = spare.launcher
            logger.info("spare ranks take over%s", "" if spare.is_loaded else ", once they are loaded")
            return LaunchWithSpares(spare.launch, self, silence)
        self._serving = self._make()
        launch = self._serving.open()
        return None if launch is None else LaunchWithSpares(launch, self, None)

    def pids(self) -> list[int]:
        """Without those of spares."""
        return self._serving.pids()

    def end_spares(self) -> None:
        while self._spares:
            self._spares.pop().launch.end()

    def close(self) -> None:
        self.end_spares()
        self._serving.close()

    def settle(self) -> None:
        """A launch begins to serve."""
        self._next_look = time.monotonic() + SETTLE_SECONDS
        self._next_start = max(self._next_start, self._next_look)

    def look_after(self) -> None:
        """Notice which spares are loaded and which have ended, and start a missing one. To be called often while ranks
        serve."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for spare in list(self._spares):
            if reason := spare.end_reason():
                self._spares.remove(spare)
                self._discard(spare, reason)
            elif not spare.is_loaded and spare.listens():
                restore_priority(spare.pids())
                spare.is_loaded = True
                self._backoff.succeeded()
                logger.info("spare ranks are loaded: %d of %d", self.num_spares, self._config.spare_ranks)
        is_loading = self.num_spares < len(self._spares)
        if len(self._spares) < self._config.spare_ranks and not is_loading and now >= self._next_start:
            self._start()

    def _start(self) -> None:
        launcher = self._make()
        try:
            launch = launcher.open()
        except (OSError, ConfigurationError) as error:
            self._note_failure(str(error))
            return
        if launch is None:  # what they are forked from is not ready, and will be at a later look
            return
        spare = Spare(launcher, launch, self._config.worker_start_timeout_ms / 1000)
        self._spares.append(spare)
        if self._is_nice:
            lower_priority(spare.pids())

    def _discard(self, spare: Spare, reason: str) -> None:
        spare.launch.end()
        self._note_failure(reason)

    def _note_failure(self, reason: str) -> None:
        seconds = self._backoff.failed()
        self._next_start = time.monotonic() + seconds
        logger.warning("spare ranks are lost: %s; others are started in %.0f s", reason, seconds)


class Spare:
    """One launch that waits."""

    def __init__(self, launcher: Launcher, launch: RunningLaunch, start_seconds: float) -> None:
        """`launcher`: of this launch alone. `start_seconds`: time to load."""
        self.launcher = launcher
        self.launch = launch
        self.is_loaded = False
        self._start_seconds = start_seconds
        self._deadline = time.monotonic() + start_seconds

    def pids(self) -> list[int]:
        return self.launcher.pids()

    def listens(self) -> bool:
        """Whether its leader does, which it begins to after all ranks have loaded."""
        return self.launch.socket_path.exists()

    def end_reason(self) -> str:
        """Why it cannot take over any more; empty if it can."""
        poll = select.poll()
        for fd in self.launch.fds():
            poll.register(fd, select.POLLIN)
        reason = self.launch.end_reason({fd for fd, _ in poll.poll(0)})
        if not reason and not self.is_loaded and time.monotonic() > self._deadline:
            return f"they were not loaded within worker_start_timeout_ms ({self._start_seconds * 1000:.0f})"
        return reason


class LaunchWithSpares:
    """Implements wire.launcher.RunningLaunch: a launch which, while it serves, has spares looked after."""

    def __init__(self, launch: RunningLaunch, spares: SpareLauncher, silence: float | None) -> None:
        """`silence`: seconds within which loaded ranks must answer; None if they are not loaded yet."""
        self._launch = launch
        self._spares = spares
        self._silence = silence
        self._answer_by = None if silence is None else time.monotonic() + silence
        self._is_published = False
        self.socket_path: Path = launch.socket_path

    def fds(self) -> list[int]:
        return self._launch.fds()

    @property
    def has_joined(self) -> bool:
        return self._launch.has_joined

    def publish(self) -> None:
        self._launch.publish()
        self._is_published = True
        self._spares.settle()

    def end_reason(self, ready_fds: Collection[object]) -> str:
        if self._is_published:
            self._spares.look_after()
        elif self._answer_by is not None and time.monotonic() > self._answer_by:
            return f"the spare ranks did not answer for {self._silence:.1f} s (worker_heartbeat_timeout_ms)"
        return self._launch.end_reason(ready_fds)

    @property
    def is_misconfigured(self) -> bool:
        return self._launch.is_misconfigured

    def wait_for_end(self, seconds: float) -> bool:
        return self._launch.wait_for_end(seconds)

    def end(self) -> None:
        self._launch.end()
