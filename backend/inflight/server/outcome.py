"""How a request ended, in the words of the metrics."""

from __future__ import annotations

from inflight import metric_families as mf
from inflight.errors import InflightError
from inflight.result import PerfMetrics, Response
from inflight.server.threads.metrics_thread import Outcome
from inflight.server.threads.sending_thread import log_failure
from inflight.server.work_item import WorkItem

_BY_FINISH_REASON = {"cancelled": "cancelled", "timeout": "timed_out"}


def ended(item: WorkItem, last: Response) -> Outcome:
    """The outcome of a request, given the engine's `last` response to it."""
    if last.has_error and not item.is_completed:
        return Outcome(outcome=last.outcome)
    observations = [
        (mf.SEQUENCES, float(item.request.num_return_sequences)),
        (mf.INPUT_TOKENS.name, float(len(item.request.input_token_ids))),
        (mf.OUTPUT_TOKENS.name, float(item.num_output_tokens)),
        (mf.END_TO_END.name, (item.answered_ns - item.accepted_ns) / 1e9),
    ]
    counts: list[tuple[str, str, float]] = []
    if item.perf_metrics is not None:
        observations += _of_perf_metrics(item.perf_metrics, item.longest_output)
        counts = _counts(item.perf_metrics)
    outcome = _BY_FINISH_REASON.get(item.finish_reason, "completed")
    return Outcome(outcome=outcome, observations=observations, counts=counts)


def refused(error: Exception) -> tuple[str, str, str]:
    """(code, sentence, outcome) of a request that was not taken. An unexpected error is logged, and its client gets a
    general sentence."""
    if not isinstance(error, InflightError):
        log_failure("taking a request", error)
        error = InflightError("the request could not be read")
    return error.code, str(error), error.outcome


def _of_perf_metrics(perf: PerfMetrics, num_tokens: int) -> list[tuple[str, float]]:
    """Latencies in seconds. A request that was stopped before its first step or token lacks the corresponding ones.
    `num_tokens`: of the longest sequence, because the sequences of a request are generated side by side."""
    observations: list[tuple[str, float]] = []
    if perf.first_scheduled_time_ns:
        observations.append((mf.QUEUE_TIME.name, (perf.first_scheduled_time_ns - perf.arrival_time_ns) / 1e9))
    if perf.first_token_time_ns:
        observations.append((mf.TIME_TO_FIRST_TOKEN.name, (perf.first_token_time_ns - perf.arrival_time_ns) / 1e9))
    if perf.first_token_time_ns and num_tokens > 1:
        between = (perf.last_token_time_ns - perf.first_token_time_ns) / (num_tokens - 1)
        observations.append((mf.TIME_PER_OUTPUT_TOKEN.name, between / 1e9))
    return observations


def _counts(perf: PerfMetrics) -> list[tuple[str, str, float]]:
    rejected = perf.total_draft_tokens - perf.total_accepted_draft_tokens
    counts = (
        (mf.PREFIX_BLOCKS.name, "hit", float(perf.kv_cache_reused_blocks)),
        (mf.PREFIX_BLOCKS.name, "miss", float(perf.kv_cache_missed_blocks)),
        (mf.DRAFT_TOKENS.name, "accepted", float(perf.total_accepted_draft_tokens)),
        (mf.DRAFT_TOKENS.name, "rejected", float(rejected)),
    )
    return [count for count in counts if count[-1]]
