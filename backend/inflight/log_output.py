"""The log of a process of ours: on standard error, in the format of tritonserver's own log lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

REPEATS, PERIOD_SECONDS = 10, 60.0
"""How many lines a place in the code may log within which time. A client that sends one bad
request after the other must not fill a disk."""


def start_logging() -> None:
    """Log to standard error, unless this process logs already."""
    root = logging.getLogger("inflight")
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    handler.addFilter(RepeatLimit())
    root.addHandler(handler)
    root.propagate = False


class RepeatLimit(logging.Filter):
    """Drops what one place in the code logs too often. The first line of its next period says how many were lost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int], tuple[float, int]] = {}
        """(file, line) -> begin of its period, and lines since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Called under the handler's lock."""
        now, place = self._clock(), (record.pathname, record.lineno)
        began, number = self._places.get(place, (now, 0))
        num_lost = 0
        if now - began >= PERIOD_SECONDS:
            began, number, num_lost = now, 0, max(number - REPEATS, 0)
        self._places[place] = (began, number + 1)
        if num_lost:
            record.msg = f"{record.getMessage()} ({num_lost} more lines like this were dropped)"
            record.args = ()
        return number < REPEATS


class _Formatter(logging.Formatter):
    """`W1121 08:26:40.123 name] message`, as tritonserver writes."""

    def __init__(self) -> None:
        super().__init__("%(letter)s%(asctime)s.%(msecs)03d %(name)s] %(message)s", "%m%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.letter = record.levelname[0]
        return super().format(record)
