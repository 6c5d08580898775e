"""The part of the Executor API that tells what the engine does: statistics and KV cache events of all its replicas."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable

from inflight.executor.front.statistics import FrontStatistics, of_replica
from inflight.kv_cache_events import KVCacheEvent
from inflight.stats import IterationStats, RequestStatsPerIteration


class StatisticsApi(ABC):
    """Has the front's lock."""

    def __init__(self, statistics: FrontStatistics) -> None:
        self._lock = threading.Lock()
        self._stats_arrived = threading.Condition(self._lock)  # apart: they arrive often, and few wait for them
        self._statistics = statistics

    @abstractmethod
    def _is_closed(self) -> bool:
        """Whether the front was shut down."""

    def num_requests_queued(self) -> int:
        """Requests of all fronts that were waiting, not active, when the newest statistics were sent."""
        return self._statistics.num_queued

    def get_latest_iteration_stats(self, timeout: float | None = 0.0) -> list[IterationStats]:
        """Statistics of the iterations since the last call, oldest first; at most the last `iter_stats_max_iterations`.

        Waits up to `timeout` seconds for the first (None = until the executor is shut down). They arrive in batches,
        shortly after their iterations: half of `stats_check_period_ms` on a busy engine."""
        with self._stats_arrived:
            self._stats_arrived.wait_for(lambda: self._statistics.iterations or self._is_closed(), timeout)
            return self._statistics.take_iterations()

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """The same of the requests in each iteration; at most the last `request_stats_max_iterations`: none unless that
        is configured."""
        with self._lock:
            return self._statistics.take_requests()

    def get_latest_batch_manager_stats(self) -> str | None:
        """The newest statistics as the batch manager's JSON (see BatchManagerStats); None if none arrived since the
        last call. Cheaper than those of every iteration."""
        with self._lock:
            return self._statistics.take_json()

    def get_kv_cache_events(self, timeout: float | None = 0.0) -> list[KVCacheEvent]:
        """What happened to the cached blocks since the last call, oldest first; at most the last
        `event_buffer_max_size`: none unless that is configured. After a relaunch they begin anew, with event 0.

        Waits up to `timeout` seconds for the first (None = until the executor is shut down). They hold tokens of all
        requests of all fronts: see inflight.kv_cache_events."""
        with self._stats_arrived:
            self._stats_arrived.wait_for(lambda: self._statistics.events or self._is_closed(), timeout)
            return self._statistics.take_events()

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _report_stats(self, json: str, num_queued: int, replica: int = 0) -> None:
        with self._lock:
            self._statistics.note(json, num_queued, replica)

    def _report_iterations(
        self,
        iterations: Iterable[IterationStats],
        requests: Iterable[RequestStatsPerIteration],
        replica: int = 0,
    ) -> None:
        with self._stats_arrived:
            self._statistics.iterations.extend(of_replica(iterations, replica))
            self._statistics.requests.extend(of_replica(requests, replica))
            self._stats_arrived.notify_all()

    def _report_kv_cache_events(self, events: Iterable[KVCacheEvent], replica: int = 0) -> None:
        with self._stats_arrived:
            self._statistics.events.extend(of_replica(events, replica))
            self._stats_arrived.notify_all()
