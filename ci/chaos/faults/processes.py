"""Processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from random import Random

from server_process import ServerFailed

from ci.chaos.faults.fault import OPENAI, TRITONSERVER, Fault, Inject
from ci.chaos.scene import FOLLOWER, LAUNCHER, LEADER, ChaosFailed, Scene, stub_of
from ci.chaos.scene import OPENAI as OPENAI_SERVER
from ci.chaos.scene import TRITONSERVER as SERVER
from inflight.supervisor import processes


def kill(*roles: str) -> Inject:
    async def inject(scene: Scene, dice: Random) -> str:
        found = scene.roles()
        return await _kill_all(scene, {role: found[role] for role in roles})

    return inject


async def _kill_all(scene: Scene, victims: dict[str, int]) -> str:
    for pid in victims.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for role, pid in victims.items():
        await scene.wait_until(lambda pid=pid: not processes.is_alive(pid), f"{role} has ended")
    return f"kill -9 {' '.join(map(str, victims.values()))}"


async def kill_during_relaunch(scene: Scene, dice: Random) -> str:
    """A rank, and another one of the next launch: while it loads, or a spare that takes over."""
    first = await _kill_all(scene, {LEADER: scene.roles()[LEADER]})

    def next_ones() -> list[int]:
        serving = [pid for role, pid in scene.roles().items() if role.startswith("rank")]
        return [*serving, *(pid for pid, part in scene.waiting_ranks().items() if part.startswith("rank"))]

    await scene.wait_until(next_ones, "a new rank is launched")
    return f"{first}, then {await _kill_all(scene, {'its successor': dice.choice(next_ones())})}"


async def kill_supervisor(scene: Scene, dice: Random) -> str:
    """The next one comes a moment later, and adopts the server."""
    supervisor, seconds = scene.server.process, dice.uniform(0.0, 3.0)
    assert supervisor is not None
    supervisor.kill()
    await asyncio.to_thread(supervisor.wait)
    await asyncio.sleep(seconds)
    try:
        await asyncio.to_thread(scene.server.start)
    except ServerFailed as error:
        raise ChaosFailed(f"the next supervisor did not adopt the server: {error}") from None
    if scene.server.endpoints != scene.endpoints:
        raise ChaosFailed("the next supervisor has started a server of its own")
    return f"kill -9 {supervisor.pid}, {seconds:.1f} s without a supervisor"


def _one_rank(scene: Scene) -> str:
    return "" if scene.num_ranks > 1 else "there is one rank, which needs no launcher"


PROCESSES = (
    Fault(name="kill the leader", inject=kill(LEADER), replaces=True),
    Fault(name="kill a follower", inject=kill(FOLLOWER), replaces=True, missing=_one_rank),
    Fault(name="kill all ranks", inject=kill(LEADER, FOLLOWER), replaces=True, missing=_one_rank),
    Fault(name="kill the launcher", inject=kill(LAUNCHER), replaces=True, missing=_one_rank),
    Fault(name="kill a rank twice", inject=kill_during_relaunch, replaces=True),
    Fault(name="kill the stub of llm", inject=kill(stub_of("llm")), replaces=True, ends=TRITONSERVER),
    Fault(name="kill a dialect's stub", inject=kill(stub_of("vllm_model")), replaces=True, ends=TRITONSERVER),
    Fault(name="kill tritonserver", inject=kill(SERVER), replaces=True, ends=TRITONSERVER),
    Fault(name="kill the supervisor", inject=kill_supervisor),
    Fault(name="kill the OpenAI server", inject=kill(OPENAI_SERVER), replaces=True, ends=OPENAI),
)
