"""How long to wait before something that failed is tried again. Knows nothing of what failed."""

from __future__ import annotations

import time
from collections.abc import Callable

STEADY = 60.0
"""Seconds of serving after which earlier failures are forgiven."""

LONGEST = 60.0
"""Seconds between two tries, at most."""


class Backoff:
    """No pause after the first failure, then 1, 2, 4, … seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._serving_since: float | None = None

    def succeeded(self) -> None:
        """It serves from now on. The time that it took to come so far is no time of service."""
        self._serving_since = self._clock()

    def failed(self) -> float:
        """Count a failure; the seconds to wait before the next try."""
        if self._serving_since is not None and self._clock() - self._serving_since >= STEADY:
            self._failures = 0
        self._serving_since = None
        self._failures += 1
        return 0.0 if self._failures == 1 else min(2.0 ** (self._failures - 2), LONGEST)
