"""Checks whether an engine still works, because tritonserver goes on reporting a hung stub or engine as healthy.

While requests end or steps are made, the engine works and no check is needed. Otherwise a request of one token is sent
to it, at the lowest priority. Any response, also a refusal, shows that the engine works. It counts as hung only if
there is neither a response nor any other sign of work, so the request may wait in a long queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOKS_PER_PERIOD = 4


class Canary:
    """The check of one engine during one run of a server."""

    def __init__(
        self,
        ask: Callable[[], None],
        signs: Callable[[], object],
        period: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` sends the request and returns after its response; it raises OSError if there will be none. `signs`
        returns a value that changes when the engine has worked; it raises OSError if that cannot be found out.
        `period` in seconds, 0 = never check.
        """
        self._ask, self._signs, self._period, self._clock = ask, signs, period, clock
        self._next_look = 0.0
        self._last_signs: object = None
        self._alive_at = clock()
        self._asked_at: float | None = None
        """When a request was first open, or attempted, after the last sign of work."""
        self._asking: threading.Thread | None = None
        self._answered = threading.Event()

    def is_dead(self) -> bool:
        """Check, if it is time to, and return whether the engine hangs. Never waits for the response of a request."""
        now = self._clock()
        if not self._period or now < self._next_look:
            return False
        self._next_look = now + self._period / LOOKS_PER_PERIOD
        try:
            signs = self._signs()
        except OSError:
            # Without the signs, a busy engine could be mistaken for a hung one.
            return False
        if signs != self._last_signs or self._answered.is_set():
            self._last_signs = signs
            self._answered.clear()
            self._alive_at, self._asked_at = now, None
        if now - self._alive_at < self._period:
            return False
        if self._asked_at is None:
            self._asked_at = now
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._run, name="canary", daemon=True)
            self._asking.start()
        return now - self._asked_at >= self._period

    def _run(self) -> None:
        try:
            self._ask()
        except OSError:
            return
        self._answered.set()
