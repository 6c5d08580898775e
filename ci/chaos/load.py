"""The mixed load: clients that ask one thing after another, and the record of each stream."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from ci.chaos.answer import Answer
from ci.chaos.scene import ChaosFailed, Scene
from ci.chaos.workload import Item

STREAM_DEADLINE = 480.0
"""Seconds after which a stream counts as hung: a server may have to be started again meanwhile."""
SHORTEST_PAUSE = 0.5
"""Seconds without a response from which on a stream counts as paused."""


@dataclass(eq=False)
class Stream:
    """One request in flight, or what became of it. Times are those of time.monotonic."""

    item: Item
    sent: float = field(default_factory=time.monotonic)
    arrivals: list[float] = field(default_factory=list)
    ended: float | None = None
    answer: Answer = field(default_factory=Answer)

    @property
    def latest(self) -> float:
        """When its last response came, or it was sent."""
        return self.arrivals[-1] if self.arrivals else self.sent

    @property
    def longest_wait(self) -> tuple[float, float]:
        """From when to when it got nothing for longest, the time before its first response and behind its last one
        included. Only of a stream that has ended."""
        assert self.ended is not None
        return max(pairwise([self.sent, *self.arrivals, self.ended]), key=lambda gap: gap[1] - gap[0])

    def pause(self, began: float, over: float) -> float:
        """Seconds of the longest time without a response that touches the span of time, once responses had come."""
        times = self.arrivals
        gaps = (after - before for before, after in pairwise(times) if after >= began and before <= over)
        return max(gaps, default=0.0)


class Load:
    """`judge` is called with every stream that has ended."""

    def __init__(self, scene: Scene, judge: Callable[[Stream], None], seed: int) -> None:
        self._scene, self._judge, self._seed = scene, judge, seed
        self._items: list[Item] = []
        self.open: set[Stream] = set()
        self.asked: Counter[str] = Counter()
        self.arrivals: list[float] = []
        """Of all streams' responses."""
        self._may_ask = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []

    def start(self, num_clients: int, items: list[Item]) -> None:
        """Clients that ask any of `items`."""
        self._items = items
        self._clients = [asyncio.create_task(self._ask_on(Random(f"{self._seed}/{n}"))) for n in range(num_clients)]
        self._may_ask.set()

    async def settle(self) -> None:
        """Ask nothing more, and wait for what is open."""
        self._may_ask.clear()
        await self._scene.wait_until(lambda: not self.open, "every stream ends", STREAM_DEADLINE)

    def go_on(self) -> None:
        self._may_ask.set()

    async def stop(self) -> None:
        """Clients leave; what they have open is cancelled."""
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def ask(self, item: Item) -> Stream:
        """One request to its end, or to the deadline."""
        stream = Stream(item)
        self.open.add(stream)
        self.asked[item.name] += 1
        try:
            asking = item.ask(self._scene.endpoints, lambda: self._note_arrival(stream))
            stream.answer = await asyncio.wait_for(asking, STREAM_DEADLINE)
        except asyncio.TimeoutError:
            stream.answer.error = f"no end within {STREAM_DEADLINE:.0f} s [HUNG]"
        finally:
            stream.ended = time.monotonic()
            self.open.discard(stream)
        return stream

    def _note_arrival(self, stream: Stream) -> None:
        now = time.monotonic()
        stream.arrivals.append(now)
        self.arrivals.append(now)

    def num_arrivals(self, start: float, end: float) -> int:
        """Responses of all streams between these times, themselves excluded."""
        return max(bisect_left(self.arrivals, end) - bisect_right(self.arrivals, start), 0)

    def check(self) -> None:
        """Raises what ended a client, which only a mistake of this program can."""
        for client in self._clients:
            if client.done() and not client.cancelled() and client.exception():
                raise ChaosFailed(f"a client of the load ended: {client.exception()!r}")

    async def _ask_on(self, dice: Random) -> None:
        while True:
            await self._may_ask.wait()
            stream = await self.ask(dice.choice(self._items))
            self._judge(stream)
            # Not at once into a server that is just being started again.
            await asyncio.sleep(1.0 if stream.answer.error else dice.uniform(0.0, 0.1))
