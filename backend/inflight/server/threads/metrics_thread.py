"""The only thread that touches tritonserver's metrics.

pb_utils' metric objects are not thread safe: using them from two threads crashes the server process. Other threads
therefore only `record` outcomes, and this thread also creates and deletes the metric objects. If the server does not
offer custom metrics, it does nothing; `--allow-metrics=false` only closes the port at which metrics are read.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from inflight import metric_families as mf
from inflight.batch_manager_stats import BatchManagerStats
from inflight.engine_description import EngineDescription
from inflight.metric_families import Family
from inflight.server.threads.sending_thread import log_failure

logger = logging.getLogger(__name__)

FINAL_WAIT_SECONDS = 5.0
"""How long `stop` waits for the thread. A server that no longer answers must not keep the stub from ending: the thread
makes no further call after this time."""

MAX_NOTES = 100_000
"""Outcomes whose observations wait for an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one request ended, for counters and histograms."""

    outcome: str
    observations: list[tuple[str, float]] = field(default_factory=list)
    """(name of the family, value)"""
    counts: list[tuple[str, str, float]] = field(default_factory=list)
    """(name of a counter's family, series, growth)"""


def own_labels(model: str, version: str) -> dict[str, str]:
    """Labels that distinguish this stub's series from those of every other stub.

    While a model is reloaded in place, two stubs serve it. In tritonserver, series with equal names and labels share
    one object, but its users are counted for each stub separately: the stub that ends first frees the object, and a
    write by the other one then corrupts the server's heap.
    """
    return {"model": model, "version": version, "pid": str(os.getpid())}


class MetricsThread:
    """Updates the metrics once a period if there is something new."""

    def __init__(
        self,
        pb_utils: Any,
        labels: dict[str, str],
        description: EngineDescription,
        period: float,
        latest_stats: Callable[[], str | None],
        num_in_flight: Callable[[], int],
        num_queued: Callable[[], int],
        of_own_engine: Mapping[str, Callable[[], Mapping[str, float]]],
        is_relaunching: Callable[[], bool],
        totals: Mapping[str, Callable[[], int]] | None = None,
        further: Mapping[str, tuple[Family, ...]] | None = None,
    ) -> None:
        """`labels`: added to every series, see `own_labels`. `description`: of the engine, shown as labels. `period` in
        seconds. `latest_stats`: returns the newest statistics (JSON) since the last call, or None. `num_in_flight`,
        `num_queued`: requests of this server, and of all fronts, as the Executor counts them. `of_own_engine`: name of
        each of OF_OWN_MODEL -> what it shows, by series; empty for a model that uses another one's engine.
        `is_relaunching`: see Executor. `totals`: name of a family -> what its counter shows. `further`: name of a
        family -> other families to which its observations go as well."""
        self._pb_utils = pb_utils
        self._labels = labels
        self._description = description
        self._period = period
        self._latest_stats = latest_stats
        self._num_in_flight = num_in_flight
        self._num_queued = num_queued
        self._of_own_engine = of_own_engine
        self._is_relaunching = is_relaunching
        self._totals = totals or {}
        self._observing = {family.name: (family,) for family in mf.FAMILIES}
        """The families to which the observations with a name go."""
        for family_name, families in (further or {}).items():
            self._observing[family_name] = (*self._observing.get(family_name, ()), *families)
        self._lock = threading.Lock()
        self._num_accepted = 0
        self._ends: Counter[str] = Counter()
        """Requests since the last update, by their outcomes. Apart from the notes, of which the oldest are dropped if
        the server does not answer: each accepted request ends once."""
        self._notes: deque[Outcome] = deque(maxlen=MAX_NOTES)
        self._metrics: dict[tuple[str, str], Any] = {}
        self._families: list[Any] = []
        self._shown: dict[tuple[str, str], float] = {}
        self._stats: BatchManagerStats | None = None
        self._stopping = threading.Event()
        self._is_given_up = False
        """Whether `stop` has returned: pb_utils must not be touched any more."""
        self._thread = threading.Thread(target=self._run, name="inflight-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(FINAL_WAIT_SECONDS)
        self._is_given_up = True

    def count_accepted(self) -> None:
        """A request that will have one outcome. From any thread; never waits for the server."""
        with self._lock:
            self._num_accepted += 1

    def record(self, outcome: Outcome) -> None:
        """Queue an outcome for the next update. Likewise."""
        with self._lock:
            self._ends[outcome.outcome] += 1
        self._notes.append(outcome)

    def _run(self) -> None:
        stopping = not self._create()
        while not stopping:
            stopping = self._stopping.wait(self._period)
            try:
                self._update()
            except Exception as error:
                log_failure("updating metrics", error)
        if not self._is_given_up:
            # Deleting a metric object is also a call to the server.
            self._metrics.clear()
            self._families.clear()

    def _create(self) -> bool:
        try:
            for family in chain.from_iterable(self._observing.values()):
                self._create_family(family)
            self._call(mf.ENGINE_INFO.name, "", "set", 1)
        except Exception as error:
            logger.info("custom metrics are off: the server does not offer them (%s)", type(error).__name__)
            return False
        return not self._is_given_up

    def _create_family(self, family: Family) -> None:
        if family in mf.OF_OWN_MODEL:
            if family.name not in self._of_own_engine:
                return
            family = replace(family, series=tuple(self._of_own_engine[family.name]()))
        if self._is_given_up:
            return
        api = self._pb_utils.MetricFamily
        made = api(name=family.name, description=family.description, kind=getattr(api, family.kind))
        self._families.append(made)
        for series in family.series:
            labels = {**self._labels, **({family.label: series} if family.label else {})}
            if family is mf.ENGINE_INFO:
                labels |= self._description.labels()
            extra = {"buckets": list(family.buckets)} if family.buckets else {}
            if not self._is_given_up:
                self._metrics[family.name, series] = made.Metric(labels=labels, **extra)

    def _update(self) -> None:
        with self._lock:
            num_accepted, self._num_accepted = self._num_accepted, 0
            ends, self._ends = self._ends, Counter()
        # First those that were accepted: whoever reads meanwhile finds no more ends than beginnings.
        if num_accepted:
            self._call(mf.ACCEPTED.name, "", "increment", num_accepted)
        for outcome, count in ends.items():
            self._call(mf.OUTCOMES.name, outcome, "increment", count)
        while self._notes:
            note = self._notes.popleft()
            for name, value in note.observations:
                self._observe(name, value)
            for name, series, growth in note.counts:
                self._call(name, series, "increment", growth)
        self._show_engine()
        for name, total in self._totals.items():
            self._raise(name, total())
        text = self._latest_stats()
        if text is not None:
            self._stats = BatchManagerStats.from_json(text)
            self._show(self._stats, self._num_queued())
        elif self._stats is not None and self._num_in_flight() == 0:
            self._show(mf.when_idle(self._stats), 0)

    def _show_engine(self) -> None:
        if self._is_relaunching():
            self._call(mf.RELAUNCHING.name, "", "increment", self._period)
        for name, shown in self._of_own_engine.items():
            for series, value in shown().items():
                self._set(name, series, float(value))

    def _observe(self, name: str, value: float) -> None:
        for family in self._observing.get(name, ()):
            self._call(family.name, family.series[0], "observe" if family.buckets else "increment", value)

    def _show(self, stats: BatchManagerStats, num_queued: int) -> None:
        for family in mf.STATISTICS_FAMILIES:
            for series, name in family.statistics.items():
                self._set(family.name, series, mf.statistic(stats, name))
        self._set(mf.KV_BLOCKS_FREE.name, "", stats.free_kv_cache_blocks)
        self._set(mf.KV_BLOCKS.name, "", stats.max_kv_cache_blocks)
        self._set(mf.REQUESTS_QUEUED.name, "", num_queued)

    def _raise(self, name: str, total: int) -> None:
        """Increment a counter to `total`."""
        growth = total - self._shown.get((name, ""), 0)
        if growth:
            self._call(name, "", "increment", growth)
            self._shown[name, ""] = total

    def _set(self, name: str, series: str, value: float) -> None:
        """Set a gauge unless it already shows the value: each call is a round trip to the server."""
        if self._shown.get((name, series)) != value:
            self._call(name, series, "set", value)
            self._shown[name, series] = value

    def _call(self, name: str, series: str, operation: str, value: float) -> None:
        if not self._is_given_up:
            getattr(self._metrics[name, series], operation)(value)
