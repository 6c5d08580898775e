"""Clocks that jump."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from random import Random

from ci.chaos.faults.fault import Fault, Inject
from ci.chaos.scene import Scene

OFFSET_FILE = "FAKETIME_TIMESTAMP_FILE"
"""Of libfaketime: a file that says how far the clock is off, read at each look at the clock."""
SECONDS = 3.0


def jump(offset: str) -> Inject:
    async def inject(scene: Scene, dice: Random) -> str:
        file = Path(os.environ[OFFSET_FILE])
        file.write_text(offset)
        await asyncio.sleep(SECONDS)
        file.write_text("+0")
        await asyncio.sleep(SECONDS)
        return f"{offset} for {SECONDS:.0f} s"

    return inject


def _no_library(scene: Scene) -> str:
    return "" if OFFSET_FILE in os.environ else "libfaketime is not installed"


CLOCKS = (
    Fault(name="the clock jumps an hour forward", inject=jump("+3600"), missing=_no_library),
    Fault(name="the clock jumps an hour back", inject=jump("-3600"), missing=_no_library),
)
