"""Whether ranks may have died of a request: then no others should, and the ranks of its replica alone go on with it.

Ranks that had begun it are not its victims if it has got something from them, or if they have sent heartbeats since.
Knows no request, and no bound on how often ranks may die.
"""

from __future__ import annotations

from dataclasses import dataclass

SURVIVED_HEARTBEATS = 2
"""Heartbeats after which ranks have lived through a step of a request that they had begun before. They are sent between
two steps, and the first may have begun beside the request."""


@dataclass(slots=True)
class Suspicion:
    """What is known of one request and of the ranks that have begun it."""

    only_replica: int | None = None
    """The replica that alone may go on with it, because its ranks may have died of it; None = each may."""
    num_deaths: int = 0
    """Of ranks that had begun it, in a row, without a new token of it in between."""
    is_running: bool = False
    """Its present ranks have begun it."""
    has_progressed: bool = False
    """They have brought it something."""
    is_released: bool = False
    """The ranks that may have died of it could not be brought back."""
    _num_heartbeats: int = 0
    """That they have sent since."""

    def note_started(self) -> None:
        self.is_running = True

    def note_heartbeat(self) -> None:
        self._num_heartbeats += self.is_running

    def note_progress(self) -> None:
        self.has_progressed = True

    def hand_over(self) -> None:
        """Its ranks have done their part, and others go on."""
        self.num_deaths = 0
        self._leave()

    def ranks_died(self, replica: int, *, planned: bool) -> None:
        """Those of `replica`, to which it was sent. `planned`: they are ended on purpose, and by nothing that they
        run."""
        was_running, is_proved = self.is_running, self.has_progressed or self._num_heartbeats >= SURVIVED_HEARTBEATS
        if was_running and not planned:
            self.num_deaths = 1 if self.has_progressed else self.num_deaths + 1
        self._leave()
        self.is_released = False
        if was_running and not planned and not is_proved:
            self.only_replica = replica

    def release(self) -> None:
        """`only_replica` could not be brought back: others may go on with it, while nothing else runs there."""
        self.only_replica = None
        self.is_released = True

    def _leave(self) -> None:
        self.only_replica = None
        self.is_running = self.has_progressed = False
        self._num_heartbeats = 0
