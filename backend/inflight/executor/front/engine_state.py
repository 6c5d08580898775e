"""The states of one replica of an engine, and of the whole engine, as a front sees them.

STARTING ──> READY ──> RELAUNCHING ──> DOWN         any ──> CLOSED
               ^            │           │
               └────────────┴───────────┘

An engine serves while one of its replicas does, and is down when none will by itself.
"""

from __future__ import annotations

import enum
from collections.abc import Collection


class EngineState(enum.Enum):
    STARTING = enum.auto()
    READY = enum.auto()
    RELAUNCHING = enum.auto()
    """The ranks are lost and are being relaunched: requests in flight and new ones wait."""
    DOWN = enum.auto()
    """Relaunches have failed, too many or for too long: requests are refused until a later one succeeds."""
    CLOSED = enum.auto()
    """This front was shut down. Final."""


_STRONGEST = (EngineState.CLOSED, EngineState.READY, EngineState.RELAUNCHING, EngineState.STARTING, EngineState.DOWN)


def overall(states: Collection[EngineState]) -> EngineState:
    """That of an engine whose replicas have these, at least one."""
    return next(state for state in _STRONGEST if state in states)


ACCEPTING = (EngineState.READY, EngineState.RELAUNCHING)
"""In which requests are taken."""
