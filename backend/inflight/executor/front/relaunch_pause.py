"""How long to wait before ranks that died are launched again: at once, then 1, 2, 4 … seconds, up to a minute."""

from __future__ import annotations

import time
from collections.abc import Callable

STABLE_SECONDS = 60.0
"""Ranks that served for so long end a row of failures. Time spent loading is not time served."""
LONGEST_PAUSE = 60.0


class RelaunchPause:
    """Counts failures in a row."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, steady."""
        self._clock = clock
        self._num_failures = 0
        self._served_since: float | None = None

    def serving(self) -> None:
        """The ranks are ready."""
        self._served_since = self._clock()

    def after_failure(self) -> float:
        """Seconds to wait, now that the ranks died or could not be launched."""
        if self._served_since is not None and self._clock() - self._served_since >= STABLE_SECONDS:
            self._num_failures = 0
        self._served_since = None
        self._num_failures += 1
        return 0.0 if self._num_failures == 1 else min(2.0 ** (self._num_failures - 2), LONGEST_PAUSE)
