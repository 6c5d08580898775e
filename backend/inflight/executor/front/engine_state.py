"""The states of an engine, as a front sees them.

STARTING ──> READY ──> RELAUNCHING ──> DOWN         any ──> CLOSED
               ^            │           │
               └────────────┴───────────┘
"""

from __future__ import annotations

import enum


class EngineState(enum.Enum):
    STARTING = enum.auto()
    READY = enum.auto()
    RELAUNCHING = enum.auto()
    """The ranks are lost and are being relaunched: requests in flight and new ones wait."""
    DOWN = enum.auto()
    """Relaunches have failed, too many or for too long: requests are refused until a later one succeeds."""
    CLOSED = enum.auto()
    """This front was shut down. Final."""


ACCEPTING = (EngineState.READY, EngineState.RELAUNCHING)
"""In which requests are taken."""
