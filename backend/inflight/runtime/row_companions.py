"""What the host keeps of some rows because their sampling depends on all their tokens: a grammar's matcher, a list.

A row's companion is made when a sequence takes the row and given up when another one takes it. A step keeps those of
its rows from its launch on, so its tokens never reach the companion of a sequence that took a row later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from inflight.scheduler_output import NewSequence

T = TypeVar("T")

NO_DRAFTS: list[int] = []
"""Never written to."""


@dataclass(frozen=True, slots=True)
class AccompaniedRow(Generic[T]):
    """A row of a step."""

    place: int
    """Among the rows that sample in the step. One that verifies drafts has a place behind this one for each of them."""
    row: int
    companion: T
    drafts: list[int]

    @property
    def places(self) -> range:
        return range(self.place, self.place + 1 + len(self.drafts))


class RowCompanions(Generic[T]):
    def __init__(self, make: Callable[[NewSequence], T | None], close: Callable[[T], None] = lambda companion: None):
        """`make`: the companion of a sequence that takes a row; None = it needs none. `close`: see to its end."""
        self._make = make
        self._close = close
        self._companions: dict[int, T] = {}

    def begin(
        self, new_sequences: list[NewSequence], sampling_rows: list[int], drafts: Mapping[int, list[int]]
    ) -> list[AccompaniedRow[T]]:
        """Take in the sequences that get a row in a step; return those of its sampling rows that have companions.

        `sampling_rows`: a row that verifies `drafts` as often as it samples.
        """
        companions = self._companions
        for new in new_sequences:
            former = companions.pop(new.row, None)
            if former is not None:
                self._close(former)
            companion = self._make(new)
            if companion is not None:
                companions[new.row] = companion
        if not companions:
            return []
        return [
            AccompaniedRow(place, row, companions[row], drafts.get(row, NO_DRAFTS))
            for place, row in enumerate(sampling_rows)
            if row in companions and (not place or sampling_rows[place - 1] != row)
        ]
