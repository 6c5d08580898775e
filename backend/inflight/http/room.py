"""Memory and cores of the host for engines that are loaded on demand: those that are idle give theirs to one that is
asked for."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from inflight.available_memory import available_memory
from inflight.errors import ConfigurationError
from inflight.http.model_engine import ModelEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an engine takes of the host."""

    num_bytes: int
    """Its weights, at least; 0 = they are elsewhere."""
    num_threads: int
    """Of all its ranks; 0 = they are not planned."""


class Room:
    """To be used on the event loop's thread."""

    def __init__(
        self, engines: Sequence[ModelEngine], needs: Mapping[str, Needs], num_cores: int | None = None
    ) -> None:
        """`needs`: of each engine, by its name. `num_cores`: None = those that this process may use."""
        self._engines = engines
        self._needs = needs
        self._num_cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
        self._loading: set[str] = set()
        """Engines on demand to which room is promised."""
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def held(self, wanted: ModelEngine) -> AsyncIterator[None]:
        """While an engine loads that is loaded on demand. Others that are idle are unloaded first, as far as there is
        no room, the one idle longest before others. Raises ConfigurationError with the figures if there still is
        none."""
        async with self._lock:
            while refusal := self._refusal(self._needs[wanted.name]):
                idle = [each for each in self._engines if each.is_on_demand and each.seconds_idle()]
                if not idle:
                    raise ConfigurationError(f"{refusal} beside the models that are in use")
                await max(idle, key=ModelEngine.seconds_idle).unload()
            self._loading.add(wanted.name)
        try:
            yield
        finally:
            self._loading.remove(wanted.name)

    def _refusal(self, needs: Needs) -> str:
        """Why there is no room; "" if there is."""
        # Of what is promised, a load has taken a part at most.
        left = available_memory() - sum(self._needs[name].num_bytes for name in self._loading)
        if needs.num_bytes > left:
            taken = f"its weights take {_gib(needs.num_bytes)}"
            return f"{taken} and {_gib(max(left, 0))} of memory are available"
        busy = [each.name for each in self._engines if each.is_loaded or not each.is_on_demand]
        num_free = self._num_cores - sum(self._needs[name].num_threads for name in {*busy, *self._loading})
        if needs.num_threads > num_free:
            return f"its ranks have {needs.num_threads} threads and {max(num_free, 0)} cores are free"
        return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
