"""Log lines that say how far something is which may take long; none where it is done within seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

SECONDS_BETWEEN_LINES = 10.0
SECONDS_TO_MENTION = 1.0
"""What took less is not mentioned when it is done."""


class LogProgress:
    """Counts what is done."""

    def __init__(
        self, logger: logging.Logger, what: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`what`: with its unit, such as "tensors are read"; it begins now. `total`: how many there are to do."""
        self.what = what
        self._logger = logger
        self._total = total
        self._clock = clock
        self._began = self._told = clock()

    def note(self, number: int) -> None:
        """So many are done."""
        now = self._clock()
        if now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            self._logger.info("%s", self._describe(number, now - self._began))

    def _describe(self, number: int, seconds: float) -> str:
        return f"{number} of {self._total} {self.what} after {seconds:.0f} s"


class ByteProgress(LogProgress):
    """Counts bytes, and says how many a second they are. `what`: such as "of the checkpoint are read"."""

    def end(self, number: int) -> None:
        """No more will be done than these."""
        seconds = self._clock() - self._began
        if seconds >= SECONDS_TO_MENTION:
            self._logger.info("%s", self._describe(number, seconds))

    def _describe(self, number: int, seconds: float) -> str:
        done, total, rate = number / 1e9, self._total / 1e9, number / 1e9 / seconds
        return f"{done:.2f} of {total:.2f} GB {self.what} after {seconds:.1f} s, {rate:.2f} GB/s"
