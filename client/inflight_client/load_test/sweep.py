"""The loads of a test: levels of concurrency or of request rate, and the number of requests per level."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from inflight_client._exceptions import UsageError

MIN_REQUESTS = 20
"""Minimum number of requests per level; with fewer, a single request would determine its p90."""
ROUNDS = 4
"""Requests per unit of concurrency: enough that start and end weigh little compared with the steady state."""
RATE_SECONDS = 10.0
"""Duration of a level of a request rate."""
MAX_LEVELS = 100


class LoadMode(str, Enum):
    """What the value of a level means."""

    CONCURRENCY = "concurrency"
    """Requests in flight at any time: a new one starts when one ends."""
    REQUEST_RATE = "request_rate"
    """Requests started per second, at Poisson intervals, however many are in flight."""

    @property
    def label(self) -> str:
        return {"concurrency": "concurrency", "request_rate": "requests/s"}[self.value]


@dataclass(frozen=True)
class Level:
    """One load to measure."""

    mode: LoadMode
    value: float
    num_requests: int

    @property
    def name(self) -> str:
        return f"{self.mode.label} {self.value:g}"


def parse_sweep(text: str, mode: LoadMode, *, num_requests: int = 0) -> list[Level]:
    """Levels of "8", "1:16:5" (start:end:step, end included if hit) or "1,4,16".

    `num_requests` is the number of requests per level; 0 chooses it by the load. A level has at least as many requests
    as are in flight at once or start in a second, which perf_analyzer requires. Raises UsageError.
    """
    values = [_level_value(value, text, mode) for value in _values(text)]
    if len(values) > MAX_LEVELS:
        raise UsageError(f"{text!r} asks for {len(values)} levels; at most {MAX_LEVELS} are measured in one test")
    return [
        Level(mode, value, max(num_requests or _default_requests(mode, value), math.ceil(value))) for value in values
    ]


def _values(text: str) -> list[float]:
    try:
        if ":" not in text:
            return [float(part) for part in text.split(",")]
        start, end, step = (float(part) for part in text.split(":"))
    except ValueError:
        raise UsageError(f"{text!r} is not a sweep; write 8, 1:16:5 (start:end:step) or 1,4,16") from None
    if not (step > 0 and end >= start and math.isfinite(end)):
        raise UsageError(f"{text!r} is not a sweep: end must not be below start and step must be positive")
    count = math.floor((end - start) / step + 1e-9) + 1
    return [start + index * step for index in range(min(count, MAX_LEVELS + 1))]


def _level_value(value: float, text: str, mode: LoadMode) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{text!r}: every level must be above 0")
    if mode is LoadMode.CONCURRENCY and value != int(value):
        raise UsageError(f"{text!r}: concurrency must be a whole number")
    return value


def _default_requests(mode: LoadMode, value: float) -> int:
    wanted = value * (ROUNDS if mode is LoadMode.CONCURRENCY else RATE_SECONDS)
    return max(MIN_REQUESTS, math.ceil(wanted))
