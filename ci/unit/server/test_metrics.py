"""Metrics: the series are the statistics, and one thread alone touches them."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping

import fake_pb_utils as pb
import msgspec
import pytest
from fake_executor import STATS

from inflight import metric_families as mf
from inflight.batch_manager_stats import BatchManagerStats
from inflight.engine_description import EngineDescription
from inflight.errors import InflightError
from inflight.result import PerfMetrics
from inflight.server.outcome import _counts, _of_perf_metrics
from inflight.server.threads.metrics_thread import MetricsThread, Outcome
from inflight.server.threads.vllm_metrics import vllm_families

ENGINE = EngineDescription(device="cpu", checkpoint="tiny", dtype="float32", num_ranks=2)


@pytest.fixture(autouse=True)
def no_metrics_before():
    pb.MetricFamily.metrics.clear()
    pb.MetricFamily.misuse.clear()
    yield
    assert not pb.MetricFamily.misuse


def run(
    *notes: Outcome,
    stats: BatchManagerStats | None = None,
    in_flight: int = 1,
    queued: int = 0,
    pb_utils=pb,
    updates: int = 1,
    relaunching: bool = False,
    owns_engine: bool = True,
    totals: Mapping[str, Callable[[], int]] | None = None,
    further: Mapping[str, tuple[mf.Family, ...]] | None = None,
) -> None:
    """One life of the thread: it updates as often as asked, the last time because it is stopped."""
    waiting = [stats.to_json()] if stats else []
    labels = {"model": "llm", "version": "1"}
    looked: list[str | None] = []
    all_but_last = threading.Event()
    owned = {
        mf.READY.name: lambda: {"": not relaunching},
        mf.REPLICA_READY.name: lambda: {"0": False, "1": not relaunching},
        mf.SPARES.name: lambda: {"": 2},
    }

    def latest_stats() -> str | None:
        looked.append(waiting.pop() if waiting else None)
        if len(looked) == updates - 1:
            all_but_last.set()
        return looked[-1]

    period = 60.0 if updates == 1 else 0.001
    thread = MetricsThread(
        pb_utils,
        labels,
        ENGINE,
        period,
        latest_stats,
        lambda: in_flight,
        lambda: queued,
        owned if owns_engine else {},
        lambda: relaunching,
        totals,
        further,
    )
    for note in notes:
        thread.record(note)
    thread.start()
    if updates > 1:
        assert all_but_last.wait(60)
    thread.stop()


def value(family: str, series: str = "") -> float:
    return pb.MetricFamily.metrics[family, series].value


def test_the_statistics_and_the_series_are_the_same_set() -> None:
    shown = [name for family in mf.STATISTICS_FAMILIES for name in family.statistics.values()]
    assert sorted(shown) == sorted(BatchManagerStats.__struct_fields__)
    assert len(shown) == len(msgspec.json.decode(STATS.to_json()))


def test_family_names_are_unique() -> None:
    assert len({family.name for family in mf.FAMILIES}) == len(mf.FAMILIES)


def test_gauges_show_the_latest_statistics() -> None:
    run(stats=STATS, queued=5)
    assert value("nv_trt_llm_request_metrics", "active") == 3
    assert value("nv_trt_llm_request_metrics", "waiting") == 1
    assert value("inflight_requests_queued") == 5
    assert value("nv_trt_llm_kv_cache_block_metrics", "fraction") == pytest.approx(0.1)
    assert value("nv_trt_llm_general_metrics", "timestamp") % 1_000_000 == 250_000
    assert value("inflight_kv_blocks_free") == 90 and value("inflight_kv_blocks") == 100
    labels = pb.MetricFamily.metrics["nv_trt_llm_request_metrics", "active"].labels
    assert labels == {"model": "llm", "version": "1", "request_type": "active"}


def test_what_the_engine_is_stands_in_labels() -> None:
    run()
    assert value("inflight_engine_info", "cpu") == 1
    labels = pb.MetricFamily.metrics["inflight_engine_info", "cpu"].labels
    assert labels["model"] == "llm" and labels["checkpoint"] == "tiny" and labels["num_ranks"] == "2"
    assert labels["device"] == "cpu" and labels["dtype"] == "float32"


def test_an_idle_engine_has_no_active_requests() -> None:
    run(stats=STATS, in_flight=0, queued=5, updates=2)
    assert value("inflight_requests_queued") == 0
    assert value("nv_trt_llm_request_metrics", "active") == 0
    assert value("nv_trt_llm_request_metrics", "max") == 64
    assert value("nv_trt_llm_kv_cache_block_metrics", "used") == 0
    assert value("nv_trt_llm_kv_cache_block_metrics", "free") == 100
    assert value("inflight_kv_blocks_free") == 100


def test_what_another_front_keeps_busy_is_shown() -> None:
    run(stats=STATS, in_flight=0)
    assert value("nv_trt_llm_request_metrics", "active") == 3


def test_the_time_of_a_relaunch_is_counted_while_it_lasts() -> None:
    run(stats=STATS, updates=5, relaunching=True)
    assert value("inflight_engine_relaunch_seconds_total") >= 5 * 0.001
    run(stats=STATS, updates=5)
    assert value("inflight_engine_relaunch_seconds_total") == 0


def test_an_engine_shows_whether_it_is_ready_and_each_replica_whether_it_is() -> None:
    run(stats=STATS, updates=5, relaunching=True)
    assert value("inflight_engine_ready") == 0
    run(stats=STATS, updates=5)
    assert value("inflight_engine_ready") == 1
    assert [value("inflight_replica_ready", replica) for replica in "01"] == [0, 1]


def test_a_model_on_another_ones_engine_does_not_speak_for_it() -> None:
    run(stats=STATS, owns_engine=False)
    for family in ("inflight_engine_ready", "inflight_replica_ready"):
        assert not any(name == family for name, _ in pb.MetricFamily.metrics)
    assert value("nv_trt_llm_request_metrics", "active") == 3


def test_prefix_hits_and_drafts_are_counted() -> None:
    perf = PerfMetrics(
        kv_cache_reused_blocks=3, kv_cache_missed_blocks=1, total_draft_tokens=8, total_accepted_draft_tokens=8
    )
    run(Outcome(outcome="completed", counts=_counts(perf)), Outcome(outcome="completed", counts=_counts(perf)))
    assert value("inflight_prefix_cache_blocks_total", "hit") == 6
    assert value("inflight_prefix_cache_blocks_total", "miss") == 2
    assert value("inflight_draft_tokens_total", "accepted") == 16
    assert value("inflight_draft_tokens_total", "rejected") == 0


def test_replays_are_counted_from_the_executors_total() -> None:
    totals = iter((0, 2, 2, 5, 5))
    run(stats=STATS, updates=5, totals={mf.REPLAYS.name: lambda: next(totals, 5)})
    assert value("inflight_request_replays_total") == 5
    assert value("inflight_engine_pauses_total") == 0


def test_outcomes_are_counted_and_observed() -> None:
    first = Outcome(outcome="completed", observations=[(mf.INPUT_TOKENS.name, 12.0), (mf.END_TO_END.name, 0.5)])
    run(first, first, Outcome(outcome="rejected"))
    assert value("inflight_requests_total", "completed") == 2
    assert value("inflight_requests_total", "rejected") == 1
    histogram = pb.MetricFamily.metrics["nv_llm_input_token_len", "total_input_tokens"]
    assert histogram.observed == [12.0, 12.0] and histogram.buckets == [10, 50, 100, 500, 1000]


def test_of_a_server_that_does_not_answer_the_counts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observations are dropped then, the oldest first."""
    monkeypatch.setattr("inflight.server.threads.metrics_thread.MAX_NOTES", 2)
    first = Outcome(outcome="completed", observations=[(mf.INPUT_TOKENS.name, 12.0)])
    run(*[first] * 5)
    assert value("inflight_requests_total", "completed") == 5
    assert pb.MetricFamily.metrics["nv_llm_input_token_len", "total_input_tokens"].observed == [12.0, 12.0]


def test_vllms_families_count_the_same_requests() -> None:
    first = Outcome(outcome="completed", observations=[(mf.INPUT_TOKENS.name, 12.0), (mf.SEQUENCES, 2.0)])
    run(first, first, further=vllm_families(100))
    metrics = pb.MetricFamily.metrics
    assert value("vllm:prompt_tokens_total") == 24
    assert metrics["vllm:request_prompt_tokens", ""].buckets == [1, 2, 5, 10, 20, 50, 100]
    assert metrics["vllm:request_prompt_tokens", ""].observed == [12, 12]
    assert metrics["vllm:request_params_n", ""].observed == [2, 2]
    assert metrics["nv_llm_input_token_len", "total_input_tokens"].observed == [12, 12]
    metrics.clear()
    run(first)
    assert not [name for name, _ in metrics if name.startswith("vllm:")]


@pytest.mark.parametrize("pb_utils", [types.SimpleNamespace(), types.SimpleNamespace(MetricFamily=1)])
def test_a_server_without_custom_metrics_is_no_error(pb_utils) -> None:
    run(Outcome(outcome="completed"), stats=STATS, pb_utils=pb_utils)
    assert not pb.MetricFamily.metrics


def test_times_come_from_the_ranks_clock() -> None:
    perf = PerfMetrics(
        arrival_time_ns=1_000_000_000,
        first_scheduled_time_ns=1_500_000_000,
        first_token_time_ns=2_000_000_000,
        last_token_time_ns=4_000_000_000,
    )
    assert _of_perf_metrics(perf, 5) == [
        (mf.QUEUE_TIME.name, 0.5),
        (mf.TIME_TO_FIRST_TOKEN.name, 1.0),
        (mf.TIME_PER_OUTPUT_TOKEN.name, 0.5),
    ]
    assert _of_perf_metrics(PerfMetrics(arrival_time_ns=5), 0) == []
    named = [mf.QUEUE_TIME.name, mf.TIME_TO_FIRST_TOKEN.name]
    assert [name for name, _ in _of_perf_metrics(perf, 1)] == named


def test_every_error_is_counted_under_a_word_that_is_shown() -> None:
    errors, found = [InflightError], set()
    while errors:
        error = errors.pop()
        errors += error.__subclasses__()
        found.add(error.outcome)
    assert found <= set(mf.OUTCOMES.series)
