"""What ranks see of a bad network and of busy hosts: messages that come late, or no more. Ranks of one machine meet in
memory, so that a message is late if its sender or its reader is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from random import Random

from ci.chaos.faults.fault import OPENAI, TRITONSERVER, Fault, Inject
from ci.chaos.scene import FOLLOWER, LEADER, Scene, stub_of
from ci.chaos.scene import OPENAI as OPENAI_SERVER
from ci.chaos.scene import TRITONSERVER as SERVER
from inflight.supervisor import processes

SHORT = 1.0
"""Seconds that are no hang for anybody who watches."""


@contextlib.asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stop_briefly(role: str) -> Inject:
    async def inject(scene: Scene, dice: Random) -> str:
        async with stopped(scene.roles()[role]):
            await asyncio.sleep(SHORT)
        return f"stopped for {SHORT} s"

    return inject


def stutter(role: str) -> Inject:
    """Each message waits for up to 0.1 s, for 4 s."""

    async def inject(scene: Scene, dice: Random) -> str:
        pid = scene.roles()[role]
        for _ in range(40):
            async with stopped(pid):
                await asyncio.sleep(dice.uniform(0.02, 0.1))
            await asyncio.sleep(0.04)
        return "stopped 40 times for up to 0.1 s"

    return inject


def hang(role: str) -> Inject:
    """It never goes on: whoever watches must end it."""

    async def inject(scene: Scene, dice: Random) -> str:
        pid = scene.roles()[role]
        os.kill(pid, signal.SIGSTOP)
        await scene.wait_until(lambda: not processes.is_alive(pid), f"{role}, which hangs, is ended")
        return f"kill -STOP {pid}"

    return inject


def _one_rank(scene: Scene) -> str:
    return "" if scene.num_ranks > 1 else "there is one rank"


NETWORK = (
    Fault(name="the leader stops briefly", inject=stop_briefly(LEADER)),
    Fault(name="a follower stops briefly", inject=stop_briefly(FOLLOWER), missing=_one_rank),
    Fault(name="messages to a follower are late", inject=stutter(FOLLOWER), missing=_one_rank),
    Fault(name="messages to the stub are late", inject=stutter(stub_of("llm"))),
    Fault(name="messages to the OpenAI server are late", inject=stutter(OPENAI_SERVER)),
    Fault(name="the leader hangs", inject=hang(LEADER), replaces=True),
    Fault(name="a follower hangs", inject=hang(FOLLOWER), replaces=True, missing=_one_rank),
    Fault(name="the stub of llm hangs", inject=hang(stub_of("llm")), replaces=True, ends=TRITONSERVER),
    Fault(name="tritonserver hangs", inject=hang(SERVER), replaces=True, ends=TRITONSERVER),
    Fault(name="the OpenAI server hangs", inject=hang(OPENAI_SERVER), replaces=True, ends=OPENAI),
)
