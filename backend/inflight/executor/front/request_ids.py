"""The ids of one front's requests, unique among all fronts of an engine: the front's own id and a number."""

from __future__ import annotations

import secrets

from inflight.executor.wire.messages import FRONT_ID_SHIFT, MAX_FRONT_ID


class RequestIds:
    """Takes no lock."""

    def __init__(self) -> None:
        self._num_drawn = 0
        self.front_id = 0
        """Drawn at random: fronts do not know each other."""
        self.redraw_front()

    def redraw_front(self) -> None:
        """Draw another id for the front, used from now on."""
        self.front_id = 1 + secrets.randbelow(MAX_FRONT_ID)

    def draw(self) -> int:
        """A fresh id."""
        self._num_drawn += 1
        return self.front_id << FRONT_ID_SHIFT | self._num_drawn
