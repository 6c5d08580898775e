"""A limit on requests a second, with a bucket of tokens for each client."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class RateLimit:
    """Each client may send so many requests at once as it may in a second, at least one."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """0 = no limit."""
        self._per_second, self._clock = per_second, clock
        self._most = max(per_second, 1.0)
        self._buckets: dict[int | None, tuple[float, float]] = {}
        """Client -> how many requests it may send, and when that was so."""

    def take(self, client: int | None) -> int:
        """Count a request. Returns 0 if it may be served, else after how many seconds the next one may."""
        if not self._per_second:
            return 0
        now = self._clock()
        left, since = self._buckets.get(client, (self._most, now))
        left = min(left + (now - since) * self._per_second, self._most)
        if left < 1:
            self._buckets[client] = (left, now)
            return math.ceil((1 - left) / self._per_second)
        self._buckets[client] = (left - 1, now)
        return 0
