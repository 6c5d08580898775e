"""Host memory for engines that are loaded on demand: those that are idle give theirs to one that is asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from inflight.available_memory import available_memory
from inflight.errors import ConfigurationError
from inflight.http.model_engine import ModelEngine


class MemoryRoom:
    """To be used on the event loop's thread."""

    def __init__(self, engines: Sequence[ModelEngine], num_bytes: Mapping[str, int]) -> None:
        """`num_bytes`: what the weights of each engine take at least, by its name."""
        self._engines = engines
        self._num_bytes = num_bytes
        self._promised: dict[str, int] = {}
        """To loads that go on, which have taken a part of it at most."""
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def held(self, wanted: ModelEngine) -> AsyncIterator[None]:
        """While an engine loads that is loaded on demand. Others that are idle are unloaded first, as far as memory is
        short, the one idle longest before others. Raises ConfigurationError with the figures if it still is."""
        async with self._lock:
            await self._make(wanted)
            self._promised[wanted.name] = self._num_bytes[wanted.name]
        try:
            yield
        finally:
            del self._promised[wanted.name]

    async def _make(self, wanted: ModelEngine) -> None:
        needed = self._num_bytes[wanted.name]
        while needed > (left := available_memory() - sum(self._promised.values())):
            idle = [each for each in self._engines if each.is_on_demand and each.seconds_idle()]
            if not idle:
                raise ConfigurationError(
                    f"its weights take {_gib(needed)} and {_gib(max(left, 0))} of memory are available beside the "
                    "models that are in use"
                )
            await max(idle, key=ModelEngine.seconds_idle).unload()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
