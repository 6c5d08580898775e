"""The engine of one model of a server: loaded at the start or when somebody asks for it, unloaded when nobody has for a
while. One load serves all who wait for it, and a load that fails is not tried again at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from inflight.backoff import Backoff
from inflight.errors import ConfigurationError, EngineUnavailable
from inflight.executor.front.front import SHUT_DOWN, Front
from inflight.executor.front.remote import RemoteFront
from inflight.http.dispatcher import Dispatcher

logger = logging.getLogger(__name__)


HeldRoom = Callable[["ModelEngine"], contextlib.AbstractAsyncContextManager[object]]


class ModelEngine:
    """To be used on the event loop's thread, but for `__init__`."""

    def __init__(
        self,
        name: str,
        make_front: Callable[[], Front],
        attach: Callable[[], Front],
        *,
        is_on_demand: bool = False,
        keep_seconds: float = math.inf,
        front: Front | None = None,
        is_loaded: bool = False,
    ) -> None:
        """`make_front`: a front that is not started; each load has a new one, but the first has `front`, if that is
        given. `attach`: another front of the same engine, which keeps statistics. `keep_seconds`: for which one on
        demand stays loaded without a request, unless `keep` says otherwise. `is_loaded`: the first front has been
        started. Raises ConfigurationError."""
        self.name = name
        self.attach = attach
        self.is_on_demand = is_on_demand
        self._make_front = make_front
        self._first_front: Front | None = front or make_front()
        self._dispatcher: Dispatcher | None = None
        self._is_loaded = is_loaded
        self._is_closed = False
        self._room: HeldRoom = contextlib.nullcontext
        self._change: asyncio.Task[None] | None = None
        """A load or an unload that is going on."""
        self._num_users = 0
        self._idle_since = time.monotonic()
        self._configured_seconds = self._keep_seconds = keep_seconds
        self._unload_later: asyncio.TimerHandle | None = None
        self._unloaded: Callable[[], None] = _nothing
        self._backoff = Backoff()
        self._failure = ""
        self._next_try = 0.0

    def begin(self) -> None:
        """Let ranks load that are this server's own, unless that is done on demand. Before `open`."""
        if not self.is_on_demand and isinstance(self._first_front, RemoteFront):
            self._first_front.begin()

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        room: HeldRoom | None = None,
        unloaded: Callable[[], None] | None = None,
    ) -> Dispatcher:
        """To be called once, before anything else. `room`: held while the engine is loaded on demand; it raises
        ConfigurationError if there is none. `unloaded` is called whenever its ranks have been ended."""
        if room is not None and self.is_on_demand:
            self._room = room
        if unloaded is not None:
            self._unloaded = unloaded
        assert self._first_front is not None, "it is open"
        self._dispatcher, self._first_front = Dispatcher(self._first_front, loop), None
        self._dispatcher.start()
        return self._dispatcher

    @property
    def front(self) -> Front:
        """Another one after each load."""
        return self.dispatcher.front

    def find_front(self) -> Front:
        return self.front

    @property
    def dispatcher(self) -> Dispatcher:
        assert self._dispatcher is not None, "it is not open"
        return self._dispatcher

    @property
    def is_loaded(self) -> bool:
        return self._is_loaded

    def is_well(self) -> bool:
        """Whether it serves, or nobody has asked for it."""
        return self.front.is_ready() if self._is_loaded else self.is_on_demand

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded and nobody uses it."""
        return self._is_loaded and not self._num_users and self._change is None

    def seconds_idle(self) -> float:
        """Since the last request has ended; 0 while there is one, or nothing to unload."""
        return time.monotonic() - self._idle_since if self.is_idle else 0.0

    def keep(self, seconds: float) -> None:
        """Keep one that is loaded on demand so long without a request, from now on and until it is unloaded. 0 = unload
        it once it is idle; infinity = for ever, but others get its room whenever it is idle."""
        if self._is_loaded:
            self._keep_seconds = seconds
            self._rest()

    def seconds_left(self) -> float:
        """Until it is unloaded if nobody asks for it; infinity = never."""
        return max(self._keep_seconds - self.seconds_idle(), 0.0) if self.is_on_demand else math.inf

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """While a request needs the engine, which is loaded first if it is not. Raises EngineUnavailable if that
        fails, or failed a moment ago."""
        self._num_users += 1
        try:
            await self.load()
            yield
        finally:
            self._num_users -= 1
            self._idle_since = time.monotonic()
            self._rest()

    async def load(self) -> None:
        """Wait until it is loaded. Raises EngineUnavailable."""
        while not self._is_loaded:
            if self._change is None:
                if time.monotonic() < self._next_try:
                    raise EngineUnavailable(self._failure)
                self._begin(self._load())
            await self._changed()
            if self._failure and not self._is_loaded:
                raise EngineUnavailable(self._failure)

    async def unload(self) -> None:
        """End its ranks, unless somebody uses it."""
        if self.is_idle:
            self._begin_unload()
            await self._changed()

    async def close(self) -> None:
        """End its ranks, or leave them, whatever goes on."""
        self._is_closed = True
        self._rest()
        await asyncio.to_thread(self.front.shutdown)
        if self._change is not None:
            await self._changed()

    def _rest(self) -> None:
        """Unload it when it has been idle for as long as it is kept."""
        if self._unload_later is not None:
            self._unload_later.cancel()
            self._unload_later = None
        seconds = self.seconds_left()
        if seconds < math.inf and self.is_idle and not self._is_closed:
            self._unload_later = asyncio.get_running_loop().call_later(seconds, self._unload_idle)

    def _unload_idle(self) -> None:
        if self.is_idle and self.seconds_left() <= 0:
            self._begin_unload()
        else:
            self._rest()

    def _begin_unload(self) -> None:
        # At once, and not with the task's first step: whoever asks for it until then would get what ends.
        self._is_loaded = False
        self._begin(self._unload())

    def _begin(self, change: Coroutine[Any, Any, None]) -> None:
        self._failure = ""
        self._change = asyncio.get_running_loop().create_task(change)

    async def _changed(self) -> None:
        """Wait for the change. Whoever gives up does not end it: others may wait."""
        assert self._change is not None
        await asyncio.shield(self._change)

    async def _load(self) -> None:
        try:
            async with self._room(self):
                await self._start()
            front = self.front
            self._is_loaded, self._next_try = True, 0.0
            self._backoff.succeeded()
            logger.info("engine %s: %s", self.name, front.description.summary(front.limits))
        except ConfigurationError as error:
            seconds = self._backoff.failed()
            self._next_try = time.monotonic() + seconds
            self._failure = f"the model {self.name} was not loaded: {error}"
            if str(error) != SHUT_DOWN:
                logger.error("%s", self._failure)
        finally:
            self._change = None
            self._idle_since = time.monotonic()
            self._rest()

    async def _start(self) -> None:
        if not self.front.can_enqueue_requests():  # it was unloaded, or has failed
            self.dispatcher.follow(await asyncio.to_thread(self._make_front))
        if self._is_closed:
            await asyncio.to_thread(self.front.shutdown)
        await asyncio.to_thread(self.front.start)

    async def _unload(self) -> None:
        self._keep_seconds = self._configured_seconds
        try:
            await asyncio.to_thread(self.front.shutdown)
            self._unloaded()
            logger.info("engine %s: unloaded", self.name)
        finally:
            self._change = None


def _nothing() -> None:
    """Where nobody asks when it is unloaded."""
