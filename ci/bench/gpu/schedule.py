"""Which part runs when, and for how long: the time of the whole bench is divided here alone.

Parts that are not timed begin together. The others follow one by one, in their order, each in a process of its own.
A part whose least time is more than what is left is skipped, and so is one whose peer is missing; a shorter one behind
it may still fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

from ci.bench.gpu.machine import read_rates
from ci.bench.gpu.part import Given, Outcome, Part
from ci.bench.gpu.process import Running

Tell = Callable[[Part, Outcome], None]
POLL_SECONDS = 0.1
DRY_PATIENCE = 5
"""Factor of a part's most seconds in a dry run: they are a GPU's, and a CPU may be busy with other things."""


class Schedule:
    def __init__(self, given: Given, tell: Tell) -> None:
        """`given`: with the seconds of the whole bench, which begin now. `tell` is called with each outcome."""
        self._given = given
        self._deadline = time.monotonic() + given.seconds
        self._tell = tell
        self._running: list[Running] = []

    def run(self, parts: Sequence[Part]) -> None:
        try:
            self._run_together([part for part in parts if not part.is_timed])
            for part in parts:
                if part.is_timed:
                    self._run_together([part])
        finally:
            for running in self._running:
                running.end()

    def _run_together(self, parts: Sequence[Part]) -> None:
        for part in parts:
            reason = self._reason_to_skip(part)
            if reason:
                self._tell(part, Outcome(status="skipped", why=reason))
            else:
                self._running.append(Running(part, self._order(part)))
        while self._running:
            time.sleep(POLL_SECONDS)
            for running in [*self._running]:
                outcome = running.poll()
                if outcome is not None:
                    self._running.remove(running)
                    self._tell(running.part, outcome)

    def _reason_to_skip(self, part: Part) -> str:
        """Empty = none."""
        if part.peer and find_spec(part.peer) is None:
            return f"{part.peer} is not installed"
        if self._left < part.least:
            return f"{max(self._left, 0):.0f} s were left, and it needs {part.least:.0f}"
        return ""

    def _order(self, part: Part) -> Given:
        measured = read_rates(self._given.folder)
        most = part.most * (DRY_PATIENCE if self._given.is_dry else 1)
        given = replace(self._given, seconds=min(most, self._left))
        return given if measured is None else replace(given, rates=measured[0], gpu_bytes=measured[1])

    @property
    def _left(self) -> float:
        return self._deadline - time.monotonic()
