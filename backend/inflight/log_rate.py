"""A limit on log records of one kind: what clients can cause must not fill a disk, nor hide what else is logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_KINDS = 256
"""Kinds that are told apart."""


@dataclass(slots=True)
class _Kind:
    since: float
    """When its present span of time began."""
    num_records: int = 0
    """In that span."""
    num_left_out: int = 0
    """Since a record was last written."""


class LogRate(logging.Filter):
    """Records of one place in the code are one kind. The first that is written after others were left out says how
    many."""

    def __init__(self, count: int = 10, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        """At most `count` of a kind within `seconds`."""
        super().__init__()
        self._count, self._seconds, self._clock = count, seconds, clock
        self._kinds: dict[tuple[str, str, int], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write it. Called by the handler, which holds its lock."""
        key, now = (record.name, record.pathname, record.lineno), self._clock()
        if key not in self._kinds and len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        kind = self._kinds.setdefault(key, _Kind(now))
        if now - kind.since >= self._seconds:
            kind.since, kind.num_records = now, 0
        kind.num_records += 1
        if kind.num_records > self._count:
            kind.num_left_out += 1
            return False
        if kind.num_left_out:
            record.msg, record.args = f"{record.getMessage()} (and {kind.num_left_out} times before)", ()
            kind.num_left_out = 0
        return True
