"""How a request ended, in the words of the metrics."""

from __future__ import annotations

from inflight.result import PerfMetrics, Response
from inflight.server.threads import metric_families as mf
from inflight.server.threads.metric_families import Family
from inflight.server.threads.metrics_thread import Outcome
from inflight.server.work_item import WorkItem

_BY_FINISH_REASON = {"cancelled": "cancelled", "timeout": "timed_out"}


def ended(item: WorkItem, last: Response) -> Outcome:
    """Of a request on which the engine had its `last` word."""
    if last.has_error and not item.is_completed:
        return Outcome(outcome=last.outcome)
    observations = [
        (mf.INPUT_TOKENS, float(len(item.request.input_token_ids))),
        (mf.OUTPUT_TOKENS, float(item.num_output_tokens)),
        (mf.END_TO_END, (item.answered_ns - item.accepted_ns) / 1e9),
    ]
    if item.perf_metrics is not None:
        observations += _of_perf_metrics(item.perf_metrics, item.longest_output)
    return Outcome(outcome=_BY_FINISH_REASON.get(item.finish_reason, "completed"), observations=observations)


def _of_perf_metrics(perf: PerfMetrics, num_tokens: int) -> list[tuple[Family, float]]:
    """Steps that never happened (a request stopped before its first token) have no time. `num_tokens`: of one sequence,
    the longest: sequences of a request are generated side by side."""
    observations: list[tuple[Family, float]] = []
    if perf.first_scheduled_time_ns:
        observations.append((mf.QUEUE_TIME, (perf.first_scheduled_time_ns - perf.arrival_time_ns) / 1e9))
    if perf.first_token_time_ns:
        observations.append((mf.TIME_TO_FIRST_TOKEN, (perf.first_token_time_ns - perf.arrival_time_ns) / 1e9))
    if perf.first_token_time_ns and num_tokens > 1:
        between = (perf.last_token_time_ns - perf.first_token_time_ns) / (num_tokens - 1)
        observations.append((mf.TIME_PER_OUTPUT_TOKEN, between / 1e9))
    return observations
