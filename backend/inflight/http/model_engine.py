"""The engine of one model of a server: loaded at the start or when somebody asks for it, unloaded when nobody has for a
while. One load serves all who wait for it, and a load that fails is not tried again at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
        front: Front | None = None,
        is_loaded: bool = False,
    ) -> None:
        """`make_front`: a front that is not started; each load has a new one, but the first has `front`, if that is
        given. `attach`: another front of the same engine, which keeps statistics. `is_loaded`: the first front has been
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
        self._backoff = Backoff()
        self._failure = ""
        self._next_try = 0.0

    def begin(self) -> None:
        """Let ranks load that are this server's own, unless that is done on demand. Before `open`."""
        if not self.is_on_demand and isinstance(self._first_front, RemoteFront):
            self._first_front.begin()

    def open(self, loop: asyncio.AbstractEventLoop, room: HeldRoom | None = None) -> Dispatcher:
        """To be called once, before anything else. `room`: held while the engine is loaded on demand; it raises
        ConfigurationError if there is none."""
        if room is not None and self.is_on_demand:
            self._room = room
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

    def seconds_idle(self) -> float:
        """Since the last request has ended; 0 while there is one, or nothing to unload."""
        is_idle = self._is_loaded and not self._num_users and self._change is None
        return time.monotonic() - self._idle_since if is_idle else 0.0

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
        if self.seconds_idle():
            self._begin(self._unload())
            await self._changed()

    async def close(self) -> None:
        """End its ranks, or leave them, whatever goes on."""
        self._is_closed = True
        await asyncio.to_thread(self.front.shutdown)
        if self._change is not None:
            await self._changed()

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

    async def _start(self) -> None:
        if not self.front.can_enqueue_requests():  # it was unloaded, or has failed
            self.dispatcher.follow(await asyncio.to_thread(self._make_front))
        if self._is_closed:
            await asyncio.to_thread(self.front.shutdown)
        await asyncio.to_thread(self.front.start)

    async def _unload(self) -> None:
        self._is_loaded = False
        try:
            await asyncio.to_thread(self.front.shutdown)
            logger.info("engine %s: unloaded", self.name)
        finally:
            self._change = None
