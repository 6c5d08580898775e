"""How many responses may leave for streams under way, where answering takes cores from the ranks. Knows no stream."""

from __future__ import annotations

import time

RESPONSES_PER_CORE = 60.0
"""A second. On a CPU a response delays the ranks by about 0.4 ms: tritonserver, its stub and the client switch threads
ten times for it, and the ranks' threads wait for the one that was switched off. 32 requests on 2 cores, 16 at a time,
through tritonserver: 0.85 of the engine's own rate with no limit; in another run 0.90 with 150 responses a second, 0.92
with 100, 0.93 with 80 (135 M parameters, bfloat16, 2026-11-21). Fewer would be seen by whoever reads a stream."""


def choose_rate(configured: int, device: str, num_cores: int) -> float:
    """Responses a second, 0 for no limit; `configured` is the key max_responses_per_second."""
    if configured >= 0:
        return configured
    return RESPONSES_PER_CORE * num_cores if device == "cpu" else 0.0


class ResponsePace:
    """For one thread. After n responses it is closed for as long as n of them are to take."""

    def __init__(self, per_second: float) -> None:
        """0 = no limit."""
        self._seconds_each = 1.0 / per_second if per_second else 0.0
        self._opens_at = 0.0

    def seconds_closed(self) -> float:
        """How long from now on; 0 = it is open."""
        return max(self._opens_at - time.monotonic(), 0.0) if self._seconds_each else 0.0

    def count(self, num_responses: int) -> None:
        """So many have left."""
        self._opens_at = max(self._opens_at, time.monotonic()) + num_responses * self._seconds_each
