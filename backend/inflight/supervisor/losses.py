"""Makes one line for the user of what the log says when ranks are lost.

Stubs and the OpenAI server are fronts of one engine. Each notices the loss by itself, and counts its own requests.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

LINE = re.compile(
    r"E\d{4} [^\]]*\binflight\.executor\.front\.connection\] "
    r"((?:replica \d+ of )?the engine(?: \S+)? is lost): (.+); (\d+) requests go on, (\d+) were ended"
)
ONLY_FOUND = "the engine's launch has ended"
"""The reason of a front that has not launched the ranks. The one that has knows more."""

SETTLED = 1.0
"""Seconds within which every front notices."""


@dataclass
class _Loss:
    since: float
    reasons: list[str] = field(default_factory=list)
    num_left: int = 0
    num_ended: int = 0


class Losses:
    """May be used from several threads."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._untold: dict[str, _Loss] = {}
        """By what is lost."""

    def note(self, line: str) -> bool:
        """Whether this line of a log is about one."""
        found = LINE.fullmatch(line)
        if found is None:
            return False
        what, reason, num_left, num_ended = found.groups()
        with self._lock:
            loss = self._untold.setdefault(what, _Loss(self._clock()))
            loss.reasons.append(reason)
            loss.num_left += int(num_left)
            loss.num_ended += int(num_ended)
        return True

    def tell_settled(self) -> None:
        """Tell what every front has noticed by now. To be called about twice a second."""
        now = self._clock()
        with self._lock:
            settled = [what for what, loss in self._untold.items() if now - loss.since >= SETTLED]
            told = [(what, self._untold.pop(what)) for what in settled]
        for what, loss in told:
            reason = next((reason for reason in loss.reasons if reason != ONLY_FOUND), ONLY_FOUND)
            self._tell(f"{what}: {reason}; {loss.num_left} requests go on, {loss.num_ended} were ended")
