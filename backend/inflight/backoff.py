"""How long to wait before retrying something that failed. Does not know what is retried."""

from __future__ import annotations

import time
from collections.abc import Callable

STEADY = 5.0
"""Seconds of uninterrupted service after which earlier failures no longer count. About as long as a start takes: what
fails again and again after that still serves half of the time."""

LONGEST = 60.0
"""Longest pause between two tries, in seconds."""


class Backoff:
    """Exponential backoff: no pause after the first failure, then 1, 2, 4, … seconds, up to LONGEST."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._serving_since: float | None = None

    def succeeded(self) -> None:
        """Service begins now. The time that the start took does not count as time of service."""
        self._serving_since = self._clock()

    def failed(self) -> float:
        """Count a failure and return the seconds to wait before the next try."""
        if self._serving_since is not None and self._clock() - self._serving_since >= STEADY:
            self._failures = 0
        self._serving_since = None
        self._failures += 1
        return 0.0 if self._failures == 1 else min(2.0 ** (self._failures - 2), LONGEST)
