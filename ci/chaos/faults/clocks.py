"""Clocks that jump."""

from __future__ import annotations

import asyncio
from random import Random

from ci.chaos import clock
from ci.chaos.faults.fault import Fault, Inject
from ci.chaos.scene import Scene

SECONDS = 3.0


def jump(offset: str) -> Inject:
    """There and, after a while, back."""

    async def inject(scene: Scene, dice: Random) -> str:
        for moved in (offset, "+0"):
            clock.move(moved)
            await asyncio.sleep(SECONDS)
        return f"{offset} s for {SECONDS:.0f} s"

    return inject


def _no_library(scene: Scene) -> str:
    return "" if clock.is_movable() else "libfaketime is not installed"


CLOCKS = (
    Fault(name="the clock jumps an hour forward", inject=jump("+3600"), missing=_no_library),
    Fault(name="the clock jumps an hour back", inject=jump("-3600"), missing=_no_library),
)
