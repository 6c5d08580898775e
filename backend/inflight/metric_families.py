"""All metric families, as tables: names, labels and buckets, and the statistic that each series shows.

The nv_trt_llm_* and nv_llm_* families are TensorRT-LLM's, so that its dashboards work; their series correspond to the
keys of the batch manager's JSON. The inflight_* families are our own. Knows nothing of pb_utils.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from inflight.batch_manager_stats import BatchManagerStats


@dataclass(frozen=True, kw_only=True)
class Family:
    """One metric family. It has a series for each value of its `label`; label "" = a single series."""

    name: str
    description: str
    kind: str
    """GAUGE, COUNTER or HISTOGRAM."""
    label: str = ""
    series: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()
    statistics: Mapping[str, str] = field(default_factory=dict)
    """series -> field of BatchManagerStats, for gauges that show the latest statistics."""


def _of_statistics(name: str, description: str, label: str, statistics: dict[str, str]) -> Family:
    return Family(
        name=name, description=description, kind="GAUGE", label=label, series=tuple(statistics), statistics=statistics
    )


def _histogram(name: str, description: str, buckets: tuple[float, ...], label: str = "", series: str = "") -> Family:
    return Family(name=name, description=description, kind="HISTOGRAM", label=label, series=(series,), buckets=buckets)


TOKEN_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

STATISTICS_FAMILIES = (
    _of_statistics(
        "nv_trt_llm_request_metrics",
        "Requests by state",
        "request_type",
        {
            "active": "active_request_count",
            "max": "max_request_count",
            "scheduled": "scheduled_requests",
            "context": "context_requests",
            "waiting": "waiting_requests",
        },
    ),
    _of_statistics(
        "nv_trt_llm_runtime_memory_metrics",
        "Memory of the ranks in bytes",
        "memory_type",
        {"cpu": "runtime_cpu_memory", "gpu": "runtime_gpu_memory", "pinned": "runtime_pinned_memory"},
    ),
    _of_statistics(
        "nv_trt_llm_kv_cache_block_metrics",
        "KV cache blocks",
        "kv_cache_block_type",
        {
            "max": "max_kv_cache_blocks",
            "free": "free_kv_cache_blocks",
            "used": "used_kv_cache_blocks",
            "tokens_per": "tokens_per_kv_cache_block",
            "reused": "reused_kv_cache_blocks",
            "fraction": "fraction_used_kv_cache_blocks",
        },
    ),
    _of_statistics(
        "nv_trt_llm_inflight_batcher_metrics",
        "In-flight batching in the latest iteration",
        "inflight_batcher_specific_metric",
        {
            "total_context_tokens": "total_context_tokens",
            "generation_requests": "generation_requests",
            "micro_batch_id": "micro_batch_id",
            "paused_requests": "paused_requests",
        },
    ),
    _of_statistics(
        "nv_trt_llm_general_metrics",
        "Latest iteration: time in microseconds since the epoch, and its number",
        "general_type",
        {"timestamp": "timestamp", "iteration_counter": "iteration_counter"},
    ),
)

ENGINE_INFO = Family(
    name="inflight_engine_info",
    description="What the engine computes, and with what, as labels; the value is 1",
    kind="GAUGE",
)
KV_BLOCKS_FREE = Family(name="inflight_kv_blocks_free", description="KV cache blocks that are free", kind="GAUGE")
KV_BLOCKS = Family(name="inflight_kv_blocks", description="KV cache blocks of the engine", kind="GAUGE")
REQUESTS_QUEUED = Family(
    name="inflight_requests_queued",
    description="Requests that wait in the leader's queue until another request ends",
    kind="GAUGE",
)
INPUT_TOKENS = _histogram(
    "nv_llm_input_token_len", "Prompt tokens of a request", TOKEN_BUCKETS, "response_metric_type", "total_input_tokens"
)
OUTPUT_TOKENS = _histogram(
    "nv_llm_output_token_len",
    "Generated tokens of a request",
    TOKEN_BUCKETS,
    "response_metric_type",
    "total_output_tokens",
)
TIME_TO_FIRST_TOKEN = _histogram(
    "inflight_time_to_first_token_seconds", "From a request's arrival at the ranks to its first token", LATENCY_BUCKETS
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "inflight_time_per_output_token_seconds", "Mean time between a request's tokens after the first", LATENCY_BUCKETS
)
QUEUE_TIME = _histogram(
    "inflight_request_queue_time_seconds", "From a request's arrival at the ranks to its first step", LATENCY_BUCKETS
)
END_TO_END = _histogram(
    "inflight_request_latency_seconds", "From a request's acceptance to its last response", LATENCY_BUCKETS
)
PREFIX_BLOCKS = Family(
    name="inflight_prefix_cache_blocks_total",
    description="Full blocks of prompts that were looked up in the prefix cache",
    kind="COUNTER",
    label="result",
    series=("hit", "miss"),
)
DRAFT_TOKENS = Family(
    name="inflight_draft_tokens_total",
    description="Draft tokens that steps have verified",
    kind="COUNTER",
    label="result",
    series=("accepted", "rejected"),
)
READY = Family(
    name="inflight_engine_ready",
    description="1 while the engine serves: every rank of one of its replicas is alive and answers; else 0",
    kind="GAUGE",
)
"""Of the engine's own model alone: so it tells engines from the other models that show the same engine's gauges. These
have stubs that may be killed by themselves, and then tritonserver shows their last values for ever."""
REPLICA_READY = Family(
    name="inflight_replica_ready",
    description="1 while every rank of a replica of the engine is alive and answers, else 0",
    kind="GAUGE",
    label="replica",
)
"""Likewise. Its series are made for as many replicas as there are."""
SPARES = Family(
    name="inflight_engine_spares",
    description="Loaded sets of ranks that wait to take over when ranks die",
    kind="GAUGE",
)
RELAUNCHES = Family(
    name="inflight_engine_relaunches_total",
    description="How often ranks were lost and a relaunch began",
    kind="COUNTER",
)
RELAUNCHING = Family(
    name="inflight_engine_relaunch_seconds_total",
    description="Time for which lost ranks were being relaunched and no replica served",
    kind="COUNTER",
)
"""The supervisor takes its growth for a sign of work: the ranks may load for minutes and answer nothing meanwhile."""
PAUSES = Family(
    name="inflight_engine_pauses_total",
    description="Times that ranks were lost while requests were in flight, which waited for others",
    kind="COUNTER",
)
REPLAYS = Family(
    name="inflight_request_replays_total",
    description="Requests that went on with other ranks after theirs were lost, each time",
    kind="COUNTER",
)
ANSWERS_CHECKED = Family(
    name="inflight_guided_answers_checked_total",
    description="Answers that ended by themselves and were held against their guides (guided_decoding_check)",
    kind="COUNTER",
)
ANSWERS_FAILED = Family(
    name="inflight_guided_answers_failed_total",
    description="Answers that were checked and did not follow their guides",
    kind="COUNTER",
)
ACCEPTED = Family(
    name="inflight_requests_accepted_total",
    description="Requests that tritonserver has passed on, each prompt by itself, whatever becomes of them",
    kind="COUNTER",
)
OUTCOMES = Family(
    name="inflight_requests_total",
    description="Requests by how they ended",
    kind="COUNTER",
    label="outcome",
    series=("completed", "cancelled", "timed_out", "rejected", "queue_full", "unavailable", "failed"),
)

OF_OWN_MODEL = (READY, REPLICA_READY, SPARES)
"""Gauges that a model which uses another one's engine does not show."""

SEQUENCES = "sequences of a request"
"""The name of an observation for which there is no family of ours."""

FAMILIES = (
    ENGINE_INFO,
    *STATISTICS_FAMILIES,
    KV_BLOCKS_FREE,
    KV_BLOCKS,
    REQUESTS_QUEUED,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    QUEUE_TIME,
    END_TO_END,
    PREFIX_BLOCKS,
    DRAFT_TOKENS,
    READY,
    REPLICA_READY,
    SPARES,
    RELAUNCHES,
    RELAUNCHING,
    PAUSES,
    REPLAYS,
    ANSWERS_CHECKED,
    ANSWERS_FAILED,
    ACCEPTED,
    OUTCOMES,
)

NONE_IN_FLIGHT = (
    "active_request_count",
    "scheduled_requests",
    "context_requests",
    "waiting_requests",
    "generation_requests",
    "paused_requests",
    "total_context_tokens",
    "used_kv_cache_blocks",
    "fraction_used_kv_cache_blocks",
)
"""Statistics that are 0 while no request is in flight. The engine reports none then."""


def when_idle(stats: BatchManagerStats) -> BatchManagerStats:
    """The latest statistics, changed to what they are once all requests have ended: every block is free again."""
    nothing = dict.fromkeys(NONE_IN_FLIGHT, 0)
    return msgspec.structs.replace(stats, **nothing, free_kv_cache_blocks=stats.max_kv_cache_blocks)


def statistic(stats: BatchManagerStats, name: str) -> float:
    """The value of a gauge for a field of BatchManagerStats; a timestamp in microseconds since the epoch."""
    if name == "timestamp":
        return datetime.strptime(stats.timestamp, "%m-%d-%Y %H:%M:%S.%f").timestamp() * 1e6
    return float(getattr(stats, name))
