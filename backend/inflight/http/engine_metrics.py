"""The engine's metrics for /metrics, by the names that they have in tritonserver: of a server that has launched it all,
of another one those of its own front alone.

They are read from the front when somebody asks. What tritonserver shows of requests this server shows of its own, under
names of its own, and how long relaunches took nobody shows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inflight import metric_families as mf
from inflight.batch_manager_stats import BatchManagerStats
from inflight.executor.front.front import Front
from inflight.metric_families import Family


class EngineMetrics(Collector):
    """To be used from one thread."""

    def __init__(self, front: Callable[[], Front], model: str, *, is_launched_here: bool) -> None:
        """`front`: tells the engine's, which is another one after each load. `model`: the engine's name, a label of
        every series."""
        self._find_front, self._model, self._is_launched_here = front, model, is_launched_here
        self._stats: BatchManagerStats | None = None

    def describe(self) -> list[Metric]:
        """By which a registry finds names twice. There are none, and what this shows depends on the engine's state."""
        return []

    def collect(self) -> Iterator[Metric]:
        front = self._find_front()
        yield self._shown(mf.ANSWERS_CHECKED, {"": front.num_answers_checked()})
        yield self._shown(mf.ANSWERS_FAILED, {"": front.num_answers_failed()})
        if not self._is_launched_here:
            return
        yield self._shown(mf.READY, {"": front.is_ready()})
        yield self._shown(mf.REPLICA_READY, {str(index): ready for index, ready in enumerate(front.ready_replicas())})
        yield self._shown(mf.SPARES, {"": front.num_spares()})
        yield self._shown(mf.RELAUNCHES, {"": front.num_losses()})
        yield self._shown(mf.PAUSES, {"": front.num_pauses()})
        yield self._shown(mf.REPLAYS, {"": front.num_replays()})
        if (text := front.get_latest_batch_manager_stats()) is not None:
            self._stats = BatchManagerStats.from_json(text)
        elif self._stats is not None and front.num_requests_in_flight() == 0:
            self._stats = mf.when_idle(self._stats)
        if self._stats is None:
            return
        for family in mf.STATISTICS_FAMILIES:
            values = {series: mf.statistic(self._stats, name) for series, name in family.statistics.items()}
            yield self._shown(family, values)
        yield self._shown(mf.KV_BLOCKS_FREE, {"": self._stats.free_kv_cache_blocks})
        yield self._shown(mf.KV_BLOCKS, {"": self._stats.max_kv_cache_blocks})
        yield self._shown(mf.REQUESTS_QUEUED, {"": front.num_requests_queued()})

    def _shown(self, family: Family, values: dict[str, float]) -> Metric:
        """`values`: by series."""
        kind = CounterMetricFamily if family.kind == "COUNTER" else GaugeMetricFamily
        metric = kind(family.name, family.description, labels=["model", *([family.label] if family.label else [])])
        for series, value in values.items():
            metric.add_metric([self._model, *([series] if family.label else [])], value)
        return metric


class AllEngines(Collector):
    """Those of several engines: each family once, with the series of all."""

    def __init__(self, engines: Sequence[EngineMetrics]) -> None:
        self._engines = engines

    def describe(self) -> list[Metric]:
        """See EngineMetrics."""
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for engine in self._engines:
            for metric in engine.collect():
                family = families.setdefault(metric.name, metric)
                if family is not metric:
                    family.samples += metric.samples
        yield from families.values()
