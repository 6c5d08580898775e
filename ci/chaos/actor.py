"""Who injects: all faults that are possible here, in a random order, then all again, each a moment after the server
serves as it did before the last one."""

from __future__ import annotations

import asyncio
import time
from random import Random

from ci.chaos.faults import Fault
from ci.chaos.load import Load
from ci.chaos.oracle import Injection, Oracle
from ci.chaos.scene import ChaosFailed, Scene

QUIET = 0.5, 4.0
"""Seconds between two faults, at random."""
SLOW = 5.0
"""Seconds from which on the log names the stream for which everybody waited."""


class Actor:
    def __init__(self, scene: Scene, load: Load, oracle: Oracle, faults: list[Fault], seed: int) -> None:
        self._scene, self._load, self._oracle = scene, load, oracle
        self._faults, self._dice = faults, Random(seed)
        self._bag: list[Fault] = []
        self._start = time.monotonic()

    async def act(self, until: float) -> None:
        """Until this time of time.monotonic."""
        while True:
            await asyncio.sleep(self._dice.uniform(*QUIET))
            self._load.check()
            if time.monotonic() >= until:
                return
            await self._inject(self._next())

    def _next(self) -> Fault:
        if not self._bag:
            self._bag = self._dice.sample(self._faults, len(self._faults))
        return self._bag.pop()

    async def _inject(self, fault: Fault) -> None:
        scene, oracle = self._scene, self._oracle
        before = scene.roles()
        injection = Injection(fault, in_flight=list(self._load.open))
        oracle.injections.append(injection)
        shown = f"{injection.began - self._start:6.1f} s  {fault.name}: {len(injection.in_flight)} streams in flight"
        print(shown, flush=True)
        # Of its own, so that what a fault does hangs on nothing but the seed.
        dice = Random(self._dice.getrandbits(64))
        try:
            injection.what = await fault.inject(scene, dice)
        except ChaosFailed as error:
            oracle.complain(f"{fault.name}: {error}")
        await scene.wait_until_serving()
        injection.serves = time.monotonic()
        last = ""

        def all_go_on() -> bool:
            nonlocal last
            stalled = injection.stalled()
            last = stalled[0].item.name if stalled else last
            return not stalled

        await scene.wait_until(all_go_on, f"every stream goes on after: {fault.name}")
        injection.over = time.monotonic()
        serves, over = injection.serves - injection.began, injection.over - injection.began
        slow = f" (the last was {last})" if over - serves >= SLOW else ""
        print(f"          {injection.what}; serves after {serves:.1f} s, over after {over:.1f} s{slow}", flush=True)
        replaced = [role for role, pid in before.items() if scene.roles().get(role) != pid]
        if replaced and not fault.replaces:
            oracle.complain(f"{fault.name}: {', '.join(replaced)} had to be replaced")
