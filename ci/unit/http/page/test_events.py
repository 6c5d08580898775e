"""The page's events say what the statistics said: who is in which lane, and how fast tokens come."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec
import pytest

from inflight.http.page.events import BatchEvent, LiveBatch, RowState, server_sent_event
from inflight.stats import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStage,
    RequestStats,
    RequestStatsPerIteration,
)

BEGIN = datetime(2026, 1, 2, 3, 4, 5)
QUEUED, PREFILL = RequestStage.QUEUED, RequestStage.CONTEXT_IN_PROGRESS
DECODE, COMPLETE = RequestStage.GENERATION_IN_PROGRESS, RequestStage.GENERATION_COMPLETE


def iteration(number: int, time_ms: int, *, num_new: int = 0, num_queued: int = 0) -> IterationStats:
    """An iteration of 10 ms that ends at `time_ms`, with 5 prompt tokens."""
    return IterationStats(
        timestamp=(BEGIN + timedelta(milliseconds=time_ms)).strftime("%m-%d-%Y %H:%M:%S.%f"),
        iter=number,
        iter_latency_ms=10.0,
        new_active_requests_queue_latency_ms=30.0 * num_new,
        num_new_active_requests=num_new,
        num_active_requests=2,
        num_queued_requests=num_queued,
        num_completed_requests=1,
        max_num_active_requests=8,
        max_batch_size_static=8,
        max_batch_size_runtime=8,
        max_num_tokens_static=64,
        max_num_tokens_runtime=64,
        gpu_mem_usage=0,
        cpu_mem_usage=0,
        pinned_mem_usage=0,
        kv_cache_stats=KvCacheStats(
            max_num_blocks=100,
            free_num_blocks=60,
            used_num_blocks=40,
            tokens_per_block=16,
            alloc_total_blocks=50,
            alloc_new_blocks=40,
            reused_blocks=10,
            missed_blocks=30,
        ),
        inflight_batching_stats=InflightBatchingStats(
            num_scheduled_requests=2,
            num_context_requests=1,
            num_gen_requests=1,
            num_paused_requests=0,
            num_waiting_requests=0,
            num_ctx_tokens=5,
            micro_batch_id=0,
            avg_num_decoded_tokens_per_iter=1.0,
        ),
    )


def request(id_: int, stage: RequestStage, num_tokens: int = 0, *, paused: bool = False) -> RequestStats:
    return RequestStats(
        id=id_,
        stage=stage,
        context_prefill_position=7,
        num_generated_tokens=num_tokens,
        avg_num_decoded_tokens_per_iter=1.0,
        scheduled=True,
        paused=paused,
        alloc_total_blocks_per_request=1,
        alloc_new_blocks_per_request=1,
        reused_blocks_per_request=0,
        missed_blocks_per_request=1,
    )


def requests(number: int, *found: RequestStats) -> RequestStatsPerIteration:
    return RequestStatsPerIteration(iter=number, request_stats=list(found))


def after(time_ms: float) -> float:
    """Milliseconds from BEGIN."""
    return round(time_ms - BEGIN.timestamp() * 1000, 3)


def advanced(batch: LiveBatch, number: int, time_ms: int, *found: RequestStats) -> BatchEvent:
    event = batch.advance([iteration(number, time_ms)], [requests(number, *found)])
    assert event is not None
    return event


def states(event: BatchEvent) -> dict[str, RowState]:
    assert event.rows is not None
    return {row.id: row.state for row in event.rows}


def test_nothing_new_is_no_event() -> None:
    assert LiveBatch().advance([], []) is None


def test_every_stage_has_its_state() -> None:
    found = [request(1, QUEUED), request(2, PREFILL), request(3, DECODE, 1), request(4, PREFILL, paused=True)]
    event = advanced(LiveBatch(), 1, 0, *found, request(5, COMPLETE, 3))
    assert states(event) == {
        "1": RowState.QUEUED,
        "2": RowState.PREFILL,
        "3": RowState.DECODE,
        "4": RowState.PAUSED,
        "5": RowState.DONE,
    }


def test_the_step_that_computes_a_whole_prompt_is_its_prefill() -> None:
    assert states(advanced(LiveBatch(), 1, 0, request(1, DECODE, 0))) == {"1": RowState.PREFILL}


def test_no_state_between_two_events_is_lost() -> None:
    event = LiveBatch().advance(
        [iteration(1, 10), iteration(2, 20), iteration(3, 30)],
        [
            requests(1, request(9, QUEUED)),
            requests(2, request(9, PREFILL)),
            requests(3, request(9, COMPLETE, 1)),
        ],
    )
    assert event is not None and event.rows is not None
    (row,) = event.rows
    assert [(after(change.time_ms), change.state) for change in row.changes] == [
        (0, RowState.QUEUED),  # the iteration that accepted it began here
        (20, RowState.PREFILL),
        (30, RowState.DONE),
    ]
    assert event.num_iterations == 3 and event.num_completed == 3


def test_a_lane_is_kept_and_the_lowest_free_one_is_given_again() -> None:
    batch = LiveBatch()
    advanced(batch, 1, 0, request(1, DECODE, 1), request(2, DECODE, 1))
    event = advanced(batch, 2, 10, request(1, COMPLETE, 2), request(2, DECODE, 2), request(3, QUEUED))
    assert event.rows is not None
    assert [(row.lane, row.id) for row in event.rows] == [(0, "1"), (1, "2"), (2, "3")]
    event = advanced(batch, 3, 20, request(2, DECODE, 3), request(3, PREFILL), request(4, QUEUED))
    assert event.rows is not None
    assert [(row.lane, row.id) for row in event.rows] == [(0, "4"), (1, "2"), (2, "3")]
    assert [len(row.changes) for row in event.rows] == [1, 0, 1]


def test_a_sequence_that_vanishes_has_ended() -> None:
    batch = LiveBatch()
    advanced(batch, 1, 0, request(1, DECODE, 1))
    assert states(advanced(batch, 2, 10)) == {"1": RowState.DONE}
    assert states(advanced(batch, 3, 20)) == {}


def test_rates_and_times() -> None:
    batch = LiveBatch()
    first = batch.advance([iteration(1, 100, num_new=2, num_queued=4)], [requests(1, request(1, PREFILL))])
    assert first is not None
    assert (first.duration_ms, first.generated_tokens_per_s, first.ttft_ms, first.itl_ms) == (0, 0, None, None)
    assert (first.queue_ms, first.num_queued) == (30, 4)
    assert after(first.time_ms) == 100
    event = batch.advance(
        [iteration(2, 150), iteration(3, 200)],
        [requests(2, request(1, DECODE, 1)), requests(3, request(1, DECODE, 3))],
    )
    assert event is not None
    assert event.duration_ms == pytest.approx(100)
    assert event.generated_tokens_per_s == pytest.approx(30)
    assert event.prefill_tokens_per_s == pytest.approx(100)
    assert event.ttft_ms == pytest.approx(60)  # accepted by the iteration that began at 90
    assert event.itl_ms == pytest.approx(25)  # two tokens in 50 ms
    assert event.queue_ms is None and event.step_ms == 10
    assert (event.kv_blocks.used, event.kv_blocks.total, event.kv_blocks.hit_rate) == (40, 100, 0.25)


def test_without_statistics_of_requests_there_are_no_rows() -> None:
    event = LiveBatch().advance([iteration(1, 0)], [])
    assert event is not None and event.rows is None and event.num_active == 2


def test_on_the_wire_it_is_one_server_sent_event() -> None:
    event = advanced(LiveBatch(), 1, 0, request(2**64 - 1, DECODE, 1))
    frame = server_sent_event(event)
    assert frame.startswith(b"data: {") and frame.endswith(b"}\n\n") and frame.count(b"\n") == 2
    assert msgspec.json.decode(frame[6:], type=BatchEvent) == event
    assert b'"id":"18446744073709551615"' in frame
