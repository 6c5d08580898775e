"""Statistics that a front has received and that were not fetched yet. Takes no lock.

The newest JSON of the batch manager is for whoever shows the present state. The rings hold the statistics of every
iteration, of every request in it, and what happened to cached blocks, for whoever wants to miss none; the oldest
entries fall out of a full ring.
"""

from __future__ import annotations

from collections import deque

from inflight.config import EngineConfig
from inflight.kv_cache_events import KVCacheEvent
from inflight.stats import IterationStats, RequestStatsPerIteration


class FrontStatistics:
    def __init__(self, config: EngineConfig, *, has_rings: bool = True) -> None:
        """`has_rings`: if False, nothing but the newest JSON is kept, whatever `config` says."""
        self._json: str | None = None
        self.num_queued = 0
        """Requests of all fronts that waited on the leader when the newest statistics were sent."""
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

    def note(self, json: str, num_queued: int) -> None:
        """The newest state of the engine."""
        self._json, self.num_queued = json, num_queued

    def take_json(self) -> str | None:
        """The newest JSON; None if none arrived since the last call."""
        json, self._json = self._json, None
        return json

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

    def forget_state(self) -> None:
        """The ranks are gone, and with them the state that the newest JSON tells. The rings keep what happened."""
        self._json, self.num_queued = None, 0
