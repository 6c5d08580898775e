"""Whether an engine still works: a hung stub or engine goes on looking healthy and answers no request.

While requests end or steps are made the engine works and is left alone. Otherwise it is sent a request of one token,
behind all others. Any answer of the engine to that is a sign of life, a refusal too. An engine counts as hung only if
there is none and nothing else moves either: in a long queue, that request waits for as long as it takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOKS_PER_PERIOD = 4


class Canary:
    """Of one engine, while one server runs."""

    def __init__(
        self,
        ask: Callable[[], None],
        signs: Callable[[], object],
        period: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` sends the request and returns at its answer; an OSError if there will be none. `signs` is something
        that differs if the engine has worked; an OSError if that cannot be known. `period` in seconds, 0 = never look.
        """
        self._ask, self._signs, self._period, self._clock = ask, signs, period, clock
        self._next_look = 0.0
        self._last_signs: object = None
        self._alive_at = clock()
        self._asked_at: float | None = None
        """When a request was first open, or tried, after the last sign of life."""
        self._asking: threading.Thread | None = None
        self._answered = threading.Event()

    def is_dead(self) -> bool:
        """Look if it is time to, and ask if need be. Never waits for the answer."""
        now = self._clock()
        if not self._period or now < self._next_look:
            return False
        self._next_look = now + self._period / LOOKS_PER_PERIOD
        try:
            signs = self._signs()
        except OSError:
            # Whoever cannot see the work must not call a busy engine dead.
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
