"""The deadlines of one launch as a front sees them: until the ranks join, until they are ready, then between two
heartbeats."""

from __future__ import annotations

import time

from inflight.config import EngineConfig
from inflight.executor.wire.launcher import LOOKS_PER_SECOND
from inflight.executor.wire.messages import FromLeader, Heartbeat, Welcome

JOIN_SECONDS = 60.0
"""Time within which the ranks must have found each other after their launch; loading the model may take longer."""


class Watch:
    """The deadlines count from its construction."""

    def __init__(self, config: EngineConfig) -> None:
        self.welcomed = False
        self._launched = self._last_sign = time.monotonic()
        self._start_seconds = config.worker_start_timeout_ms / 1000
        self._join_seconds = min(JOIN_SECONDS, self._start_seconds)
        self._heartbeat_seconds = config.worker_heartbeat_timeout_ms / 1000

    def wait_seconds(self) -> float:
        """Longest time to wait before `overdue`, and the launch, must be asked again."""
        return min(self._heartbeat_seconds / 10, 1 / LOOKS_PER_SECOND) if self.welcomed else 0.1

    def heard(self, message: FromLeader) -> None:
        if isinstance(message, Welcome):
            self.welcomed = True
        if isinstance(message, Welcome | Heartbeat):
            self._last_sign = time.monotonic()

    def excuse(self) -> None:
        """This process was suspended and could not receive heartbeats: restart the heartbeat's deadline."""
        self._last_sign = time.monotonic()

    def overdue(self, *, has_joined: bool) -> str:
        """Which deadline has passed, as a sentence; empty if none."""
        now = time.monotonic()
        if self.welcomed:
            silent = now - self._last_sign
            late = silent > self._heartbeat_seconds
            return f"the ranks sent no heartbeat for {silent:.1f} s (worker_heartbeat_timeout_ms)" if late else ""
        if now - self._launched > self._start_seconds:
            return f"the engine was not ready within worker_start_timeout_ms ({self._start_seconds * 1000:.0f})"
        if not has_joined and now - self._launched > self._join_seconds:
            return f"the engine's ranks did not find each other within {self._join_seconds:.0f} s"
        return ""
