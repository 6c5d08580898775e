"""Statistics of all replicas that a front has received and that were not fetched yet. Takes no lock.

The newest JSON of the batch manager is for whoever shows the present state. The rings hold the statistics of every
iteration, of every request in it, and what happened to cached blocks, for whoever wants to miss none; the oldest
entries fall out of a full ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from msgspec import structs

from inflight.batch_manager_stats import BatchManagerStats
from inflight.config import EngineConfig
from inflight.kv_cache_events import KVCacheEvent
from inflight.stats import IterationStats, RequestStatsPerIteration

_T = TypeVar("_T", IterationStats, RequestStatsPerIteration, KVCacheEvent)


def of_replica(noted: Iterable[_T], replica: int) -> Iterable[_T]:
    """The same, with the replica that they are of: its ranks do not know which one they are."""
    return (structs.replace(each, replica=replica) for each in noted) if replica else noted


class FrontStatistics:
    def __init__(self, config: EngineConfig, *, num_replicas: int = 1, has_rings: bool = True) -> None:
        """`has_rings`: if False, nothing but the newest JSON is kept, whatever `config` says."""
        self._newest: list[str | None] = [None] * num_replicas
        self._num_queued = [0] * num_replicas
        self._has_news = False
        self.iterations: deque[IterationStats] = deque(maxlen=config.iter_stats_max_iterations * has_rings)
        self.requests: deque[RequestStatsPerIteration] = deque(maxlen=config.request_stats_max_iterations * has_rings)
        self.events: deque[KVCacheEvent] = deque(maxlen=config.event_buffer_max_size * has_rings)

    @property
    def wants_events(self) -> bool:
        return self.events.maxlen != 0

    @property
    def wants_iterations(self) -> bool:
        """Whether the ring has room at all: otherwise the leader need not make them."""
        return self.iterations.maxlen != 0

    @property
    def wants_requests(self) -> bool:
        return self.requests.maxlen != 0

    @property
    def num_queued(self) -> int:
        """Requests of all fronts that waited on the leaders when these sent their newest statistics."""
        return sum(self._num_queued)

    def note(self, json: str, num_queued: int, replica: int) -> None:
        """The newest state of a replica."""
        self._newest[replica], self._num_queued[replica] = json, num_queued
        self._has_news = True

    def take_json(self) -> str | None:
        """The newest JSON, of all replicas together; None if none arrived since the last call."""
        if not self._has_news:
            return None
        self._has_news = False
        known = [json for json in self._newest if json is not None]
        if len(known) == 1:
            return known[0]
        return BatchManagerStats.total([BatchManagerStats.from_json(json) for json in known]).to_json()

    def take_iterations(self) -> list[IterationStats]:
        """All since the last call, oldest first."""
        taken = list(self.iterations)
        self.iterations.clear()
        return taken

    def take_requests(self) -> list[RequestStatsPerIteration]:
        """All since the last call, oldest first."""
        taken = list(self.requests)
        self.requests.clear()
        return taken

    def take_events(self) -> list[KVCacheEvent]:
        """All since the last call, oldest first."""
        taken = list(self.events)
        self.events.clear()
        return taken

    def forget_state(self, replica: int) -> None:
        """Its ranks are gone, and with them the state that the newest JSON tells. The rings keep what happened."""
        self._newest[replica], self._num_queued[replica] = None, 0
        self._has_news = any(json is not None for json in self._newest)
