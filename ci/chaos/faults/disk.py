"""A disk that is full, where the server's run directory, its logs and its temporary files are."""

from __future__ import annotations

import asyncio
from random import Random

from ci.chaos.faults.fault import Fault
from ci.chaos.faults.filled import filled
from ci.chaos.faults.processes import kill
from ci.chaos.scene import LEADER, Scene

SECONDS = 5.0


async def no_room(scene: Scene, dice: Random) -> str:
    with filled(scene.sandbox.temporary):
        await asyncio.sleep(SECONDS)
    return f"not a byte free for {SECONDS:.0f} s"


async def no_room_for_new_ranks(scene: Scene, dice: Random) -> str:
    with filled(scene.sandbox.temporary):
        done = await kill(LEADER)(scene, dice)
        await asyncio.sleep(SECONDS)
    return f"{done}, and not a byte free for {SECONDS:.0f} s"


def _not_private(scene: Scene) -> str:
    return scene.sandbox.why_shared


DISK = (
    Fault(name="the disk is full", inject=no_room, missing=_not_private),
    Fault(
        name="the disk is full and the leader dies", inject=no_room_for_new_ranks, replaces=True, missing=_not_private
    ),
)
