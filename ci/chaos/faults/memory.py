"""Memory and descriptors that run out."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

from ci.chaos.faults.fault import OPENAI, TRITONSERVER, Fault, Inject
from ci.chaos.faults.filled import filled
from ci.chaos.sandbox import SHARED_MEMORY
from ci.chaos.scene import FOLLOWER, LEADER, Scene
from ci.chaos.scene import OPENAI as OPENAI_SERVER
from ci.chaos.scene import TRITONSERVER as SERVER

SECONDS = 3.0
SHORT = 1.0
"""Without descriptors a server answers nobody: if it lasted, the supervisor would rightly start it again."""
FEW_DESCRIPTORS = 16
"""Fewer than each server has open, so no more can be opened; enough for poll(2), which refuses to wait for more
descriptors than the limit, whatever their numbers."""


@contextlib.asynccontextmanager
async def limited(pid: int, what: int, value: int) -> AsyncIterator[None]:
    """Lower a limit of a running process."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (value, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)


def no_memory(role: str) -> Inject:
    """No allocation that needs more pages succeeds."""

    async def inject(scene: Scene, dice: Random) -> str:
        pid = scene.roles()[role]
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        async with limited(pid, resource.RLIMIT_AS, pages * resource.getpagesize()):
            await asyncio.sleep(SECONDS)
        return f"not a page more for {SECONDS:.0f} s"

    return inject


def no_descriptors(role: str) -> Inject:
    """No file, socket or connection can be opened."""

    async def inject(scene: Scene, dice: Random) -> str:
        async with limited(scene.roles()[role], resource.RLIMIT_NOFILE, FEW_DESCRIPTORS):
            await asyncio.sleep(SHORT)
        return f"no descriptor more for {SHORT:.0f} s"

    return inject


async def no_shared_memory(scene: Scene, dice: Random) -> str:
    with filled(SHARED_MEMORY):
        await asyncio.sleep(SECONDS)
    return f"/dev/shm full for {SECONDS:.0f} s"


def _one_rank(scene: Scene) -> str:
    return "" if scene.num_ranks > 1 else "there is one rank"


def _not_private(scene: Scene) -> str:
    return scene.sandbox.why_shared


MEMORY = (
    Fault(name="no memory for the leader", inject=no_memory(LEADER), replaces=True),
    Fault(name="no memory for a follower", inject=no_memory(FOLLOWER), replaces=True, missing=_one_rank),
    Fault(name="no descriptors for the OpenAI server", inject=no_descriptors(OPENAI_SERVER), refuses=OPENAI),
    Fault(name="no descriptors for tritonserver", inject=no_descriptors(SERVER), refuses=TRITONSERVER),
    Fault(name="no shared memory", inject=no_shared_memory, ends=TRITONSERVER, replaces=True, missing=_not_private),
)
