"""Detects an engine that has stopped working. tritonserver goes on calling a model ready whose stub or engine hangs.

While requests end or steps are computed, the engine works and is sent nothing. Otherwise it is sent a request of one
token with the lowest priority. Any answer to it, also a refusal, shows that the engine works. The engine counts as hung
only if there is no answer and no other sign of work either: in a long queue that request waits as long as it takes, and
so it does while lost ranks are relaunched, which the stub shows and bounds by worker_start_timeout_ms.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOKS_PER_PERIOD = 4


class Canary:
    """Watches one engine of one run of a server."""

    def __init__(
        self,
        ask: Callable[[], None],
        signs: Callable[[], object],
        period: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` sends the request and returns when it is answered; it raises OSError if no answer can come. `signs`
        returns a value that changes whenever the engine has worked; it raises OSError if that cannot be known. `period`
        in seconds; 0 = never look."""
        self._ask, self._signs, self._period, self._clock = ask, signs, period, clock
        self._next_look = 0.0
        self._last_signs: object = None
        self._alive_at = clock()
        self._asked_at: float | None = None
        """When the first request after the last sign of work was sent, or could not be sent."""
        self._asking: threading.Thread | None = None
        self._answered = threading.Event()

    def is_dead(self) -> bool:
        """Whether the engine counts as hung. Looks for signs, and sends the request, if it is time to; never waits."""
        now = self._clock()
        if not self._period or now < self._next_look:
            return False
        self._next_look = now + self._period / LOOKS_PER_PERIOD
        try:
            signs = self._signs()
        except OSError:
            # Without the signs, a busy engine cannot be told from a hung one.
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
