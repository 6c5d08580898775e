"""The deadlines of one launch, as a front sees them: joined, ready, and then never silent for long."""

from __future__ import annotations

import time

from inflight.config import EngineConfig
from inflight.executor.wire.messages import FromLeader, Heartbeat, Welcome

JOIN_SECONDS = 60.0
"""The ranks must have found each other so long after their launch; loading may take longer."""


class Watch:
    """Starts to count when it is made."""

    def __init__(self, config: EngineConfig) -> None:
        self.welcomed = False
        self._launched = self._last_sign = time.monotonic()
        self._start_seconds = config.worker_start_timeout_ms / 1000
        self._join_seconds = min(JOIN_SECONDS, self._start_seconds)
        self._heartbeat_seconds = config.worker_heartbeat_timeout_ms / 1000

    def wait_seconds(self) -> float:
        """How long to wait at most before asking for what is overdue."""
        return self._heartbeat_seconds / 10 if self.welcomed else 0.1

    def heard(self, message: FromLeader) -> None:
        if isinstance(message, Welcome):
            self.welcomed = True
        if isinstance(message, Welcome | Heartbeat):
            self._last_sign = time.monotonic()

    def excuse(self) -> None:
        """This process stood still, so nobody could have been heard: start to wait anew."""
        self._last_sign = time.monotonic()

    def overdue(self, *, has_joined: bool) -> str:
        """What should have happened by now and has not; empty if nothing."""
        now = time.monotonic()
        if self.welcomed:
            silent = now - self._last_sign
            late = silent > self._heartbeat_seconds
            return f"the ranks were silent for {silent:.1f} s (worker_heartbeat_timeout_ms)" if late else ""
        if now - self._launched > self._start_seconds:
            return f"the engine was not ready within worker_start_timeout_ms ({self._start_seconds * 1000:.0f})"
        if not has_joined and now - self._launched > self._join_seconds:
            return f"the engine's ranks did not find each other within {self._join_seconds:.0f} s"
        return ""
