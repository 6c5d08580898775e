"""Whether requests go on waiting for new ranks after a try to bring lost ones back has failed. Knows no process.

The first try may fail for a reason that has passed by the next one: ranks are killed while they load, or memory is
short for a moment. So it is tried again until a bound, unless a rank has said that no try can succeed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_TRIES = 8
"""With the pauses of a Backoff between them these take about a minute, and the time of seven failed launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnd:
    """How one launch has ended, or why there was none."""

    reason: str
    has_served: bool = False
    is_misconfigured: bool = False
    """Another launch would end in the same way."""


class Relaunches:
    """The tries since ranks were lost."""

    def __init__(self, seconds: float, max_tries: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds`: after the ranks were lost, in which a try may begin."""
        self._seconds = seconds
        self._max_tries = max_tries
        self._clock = clock
        self._lost_at = clock()
        self._num_tries = 0
        self.are_given_up = False
        """Requests do not wait any more. True until ranks serve again."""

    def note(self, end: LaunchEnd) -> None:
        """A launch, or a try to make one, has ended."""
        if end.has_served:
            self._lost_at, self._num_tries, self.are_given_up = self._clock(), 0, False
            return
        self._num_tries += 1
        is_late = self._clock() - self._lost_at >= self._seconds
        if end.is_misconfigured or is_late or self._num_tries >= self._max_tries:
            self.are_given_up = True
