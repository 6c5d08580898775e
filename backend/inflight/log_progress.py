"""Log lines that say how far something is which may take long; none where it is done within seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

SECONDS_BETWEEN_LINES = 10.0


class LogProgress:
    def __init__(
        self, logger: logging.Logger, what: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`what`: with its unit, such as "tensors are read"; it begins now. `total`: how many there are to do."""
        self._logger = logger
        self._what = what
        self._total = total
        self._clock = clock
        self._began = self._told = clock()

    def note(self, number: int) -> None:
        """So many are done."""
        now = self._clock()
        if now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            self._logger.info("%d of %d %s after %.0f s", number, self._total, self._what, now - self._began)
