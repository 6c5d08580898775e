"""The statistics of every iteration and of every request in it: each number is the true one, checked over a history."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import count
from typing import Any

from harness import Harness, drafted, make_request
from msgspec import structs
from replays import replay_after

from inflight.batch_manager.statistics import MEMORY_NS, MemoryUsage, batching_stats
from inflight.batch_manager_stats import BatchManagerStats
from inflight.config import SchedulerPolicy
from inflight.result import FinishReason
from inflight.scheduler_output import RowWork
from inflight.stats import IterationStats, RequestStage, RequestStats, RequestStatsPerIteration

MILLISECOND = 1_000_000


class Observer:
    """Keeps what the end of every iteration says."""

    def __init__(self, **options: Any) -> None:
        ticks = count(0, MILLISECOND)
        self.harness = Harness(clock=lambda: next(ticks), **options)
        self.iterations: list[IterationStats] = []
        self.requests: list[RequestStatsPerIteration] = []
        manager = self.harness.manager
        manager._callbacks = replace(self.harness.callbacks, end_iteration=self.note)

    def note(self) -> None:
        self.iterations.append(self.harness.manager.statistics())
        self.requests.append(self.harness.manager.request_statistics())

    def of_request(self, request_id: int, sequence_index: int = 0) -> list[RequestStats]:
        return [
            stats
            for iteration in self.requests
            for stats in iteration.request_stats
            if (stats.id, stats.sequence_index) == (request_id, sequence_index)
        ]


def test_every_request_begins_once_and_completes_once() -> None:
    observer = Observer(max_batch_size=2)
    requests = [make_request(number, 5, 3 + number, streaming=number % 2 == 0) for number in range(6)]
    observer.harness.serve(*requests, make_request(9, []))
    seen = observer.iterations
    assert sum(stats.num_new_active_requests for stats in seen) == 6, "a refused request was never active"
    assert sum(stats.num_completed_requests for stats in seen) == 6
    assert seen[-1].num_active_requests == 0 and seen[-1].inflight_batching_stats.num_scheduled_requests == 0
    num_active = 0
    for stats in seen:
        num_active += stats.num_new_active_requests - stats.num_completed_requests
        assert stats.num_active_requests == num_active
    numbers = [stats.iter for stats in seen]
    assert numbers == sorted(numbers) and numbers[-1] == observer.harness.runner.num_launches


def test_perf_metrics_name_the_iterations_of_the_first_and_the_last_token() -> None:
    harness = Observer(max_num_tokens=16, max_batch_size=4).harness
    harness.serve(make_request(1, 6, 8), make_request(2, 40, 4, num_return_sequences=2))
    launched = harness.runner.launched
    for request_id, num_tokens, sequences in ((1, 8, 1), (2, 4, 2)):
        metrics = harness.final(request_id).request_perf_metrics
        assert metrics is not None
        rows = {
            new.row
            for step in launched
            for new in step.new_sequences
            if new.num_prompt_tokens == (6, 40)[request_id - 1]
        }
        assert len(rows) == sequences
        sampled = [number for number, step in enumerate(launched, start=1) if rows & set(step.sampling_rows)]
        assert metrics.first_iter == sampled[0]
        assert metrics.last_iter in sampled and metrics.last_iter >= metrics.first_iter + num_tokens - 1


def test_an_idle_engine_has_no_iterations() -> None:
    observer = Observer()
    observer.harness.serve(make_request(1, 4, 2))
    num_before = len(observer.iterations)
    for _ in range(5):
        observer.harness.step()
    assert len(observer.iterations) == num_before


def test_the_step_is_counted_as_it_was_launched() -> None:
    observer = Observer(max_num_tokens=16, max_batch_size=4)
    observer.harness.serve(make_request(1, 6, 8), make_request(2, 20, 4))
    by_number = {stats.iter: stats for stats in reversed(observer.iterations)}
    for number, launched in enumerate(observer.harness.runner.launched, start=1):
        batching = by_number[number].inflight_batching_stats
        prefills = [work for work in launched.rows if work.is_prefill]
        assert batching.num_scheduled_requests == len(launched.rows)
        assert batching.num_context_requests == len(prefills)
        assert batching.num_gen_requests == len(launched.rows) - len(prefills)
        assert batching.num_ctx_tokens == sum(work.num_tokens for work in prefills)
        assert batching.avg_num_decoded_tokens_per_iter == (1.0 if batching.num_gen_requests else 0.0)
    assert {stats.max_num_active_requests for stats in observer.iterations} == {4}
    assert {stats.max_num_tokens_runtime for stats in observer.iterations} == {16}


def test_drafts_count_as_tokens_that_a_sequence_may_get() -> None:
    plain = RowWork(row=0, start=9, num_tokens=1)
    drafted = RowWork(row=1, start=9, num_tokens=4, token_ids=[1, 2, 3], num_sampled=4)
    prompt = RowWork(row=2, start=0, num_tokens=5, token_ids=[1, 2, 3, 4, 5], num_sampled=0)
    found = batching_stats([plain, drafted, prompt], num_paused=0, num_sequences=4)
    assert found.avg_num_decoded_tokens_per_iter == 2.5
    assert (found.num_scheduled_requests, found.num_context_requests, found.num_gen_requests) == (3, 1, 2)
    assert (found.num_ctx_tokens, found.num_waiting_requests) == (5, 1)


def test_iterations_report_their_drafts() -> None:
    observer = Observer(max_batch_size=8, max_num_tokens=32)
    observer.harness.serve(drafted(1, 5, 20), make_request(2, 5, 20))
    found = [stats.spec_decoding_stats for stats in observer.iterations if stats.spec_decoding_stats is not None]
    assert [each.num_draft_tokens for each in found] == [each.num_accepted_tokens for each in found]
    assert sum(each.num_draft_tokens for each in found) == 16
    assert all(each.num_requests_with_draft_tokens == 1 for each in found)
    assert [each.acceptance_length for each in found] == [1 + each.num_accepted_tokens for each in found]
    assert observer.iterations[0].spec_decoding_stats is None


def test_blocks_are_counted_as_they_were_found() -> None:
    observer = Observer(block_size=4, num_blocks=40)
    prompt = list(range(1, 14))
    observer.harness.serve(make_request(1, prompt, 3))
    first = observer.iterations[-1].kv_cache_stats
    assert (first.alloc_total_blocks, first.alloc_new_blocks, first.reused_blocks) == (4, 4, 0)
    assert (first.missed_blocks, first.cache_hit_rate) == (3, 0.0)
    observer.harness.serve(make_request(2, prompt, 3))
    last = observer.iterations[-1].kv_cache_stats
    assert (last.alloc_total_blocks, last.alloc_new_blocks, last.reused_blocks) == (8, 5, 3)
    assert (last.missed_blocks, last.cache_hit_rate) == (3, 0.5)
    for stats in observer.iterations:
        blocks = stats.kv_cache_stats
        assert blocks.used_num_blocks + blocks.free_num_blocks == blocks.max_num_blocks == 40
        assert blocks.tokens_per_block == 4
    again = observer.of_request(2)[-1]
    assert (again.alloc_total_blocks_per_request, again.alloc_new_blocks_per_request) == (4, 1)
    assert (again.reused_blocks_per_request, again.missed_blocks_per_request) == (3, 0)
    assert again.kv_cache_hit_rate_per_request == 1.0


def test_the_latency_is_the_iterations_own() -> None:
    now = [0]

    def clock() -> int:
        now[0] += MILLISECOND
        return now[0]

    harness = Harness(clock=clock)
    seen: list[IterationStats] = []
    harness.manager._callbacks = replace(
        harness.callbacks, end_iteration=lambda: seen.append(harness.manager.statistics())
    )
    harness.step()
    now[0] += 3600 * 1000 * MILLISECOND
    get = harness.callbacks.get_inference_requests

    def wait_for_requests(count: int) -> Any:
        now[0] += 3600 * 1000 * MILLISECOND  # an idle engine waits here
        return get(count)

    harness.manager._callbacks = replace(harness.manager._callbacks, get_inference_requests=wait_for_requests)
    harness.submit(make_request(1, 4, 3))
    harness.step()
    assert len(seen) == 1 and 0 < seen[0].iter_latency_ms < 3600 * 1000


def test_a_requests_stages_follow_each_other() -> None:
    observer = Observer(max_num_tokens=16, max_batch_size=1)
    observer.harness.submit(make_request(1, 40, 3, num_return_sequences=1))
    observer.harness.submit(make_request(2, 4, 2))
    observer.harness.run_until_idle()
    stages = [stats.stage for stats in observer.of_request(1)]
    assert stages == sorted(stages)
    assert set(stages) == {
        RequestStage.CONTEXT_IN_PROGRESS,
        RequestStage.GENERATION_IN_PROGRESS,
        RequestStage.GENERATION_COMPLETE,
    }
    positions = [stats.context_prefill_position for stats in observer.of_request(1)]
    assert positions[:3] == [16, 32, 40] and positions[-1] == 40
    last = observer.of_request(1)[-1]
    assert (last.num_generated_tokens, last.avg_num_decoded_tokens_per_iter, last.scheduled) == (3, 1.0, False)
    assert sum(stats.stage is RequestStage.GENERATION_COMPLETE for stats in observer.of_request(1)) == 1


def test_a_request_without_a_row_is_queued_and_a_paused_one_is_paused() -> None:
    observer = Observer(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=6, max_num_tokens=64)
    observer.harness.serve(make_request(1, 8, 14), make_request(2, 8, 12), make_request(3, 8, 2))
    everything = [stats for iteration in observer.requests for stats in iteration.request_stats]
    paused = [stats for stats in everything if stats.paused]
    assert paused and all(not stats.scheduled for stats in paused)
    queued = [stats for stats in everything if stats.stage is RequestStage.QUEUED]
    assert queued and all(not stats.scheduled and stats.num_generated_tokens == 0 for stats in queued)
    for iteration, requests in zip(observer.iterations, observer.requests, strict=True):
        batching = iteration.inflight_batching_stats
        assert sum(stats.scheduled for stats in requests.request_stats) == batching.num_scheduled_requests
        assert sum(stats.paused for stats in requests.request_stats) == batching.num_paused_requests


def test_each_sequence_of_a_request_is_told_apart() -> None:
    observer = Observer()
    observer.harness.serve(make_request(1, 5, 6, num_return_sequences=3))
    found: dict[int, RequestStage] = defaultdict(lambda: RequestStage.QUEUED)
    for stats in observer.requests[-1].request_stats:
        found[stats.sequence_index] = stats.stage
    assert dict(found) == dict.fromkeys(range(3), RequestStage.GENERATION_COMPLETE)
    assert sum(stats.num_completed_requests for stats in observer.iterations) == 1


def test_a_stopped_request_completes_in_the_iteration_that_answers_it() -> None:
    observer = Observer()
    observer.harness.submit(make_request(1, 4, 30))
    observer.harness.step()
    observer.harness.stops = {1: FinishReason.CANCELLED}
    observer.harness.step()
    assert [stats.num_completed_requests for stats in observer.iterations] == [0, 1]


def test_the_batch_managers_json_says_the_same() -> None:
    observer = Observer()
    observer.harness.serve(make_request(1, 6, 8), make_request(2, 20, 8))
    for text, stats in zip(observer.harness.stats, observer.iterations, strict=False):
        told = BatchManagerStats.from_json(text)
        assert (told.iteration_counter, told.active_request_count) == (stats.iter, stats.num_active_requests)
        assert told == BatchManagerStats.of(structs.replace(stats, timestamp=told.timestamp))


def test_decoding_iterations_are_counted_in_each_result() -> None:
    harness = Harness()
    harness.serve(make_request(1, 4, 5, streaming=True), make_request(2, 4, 5))
    assert [result.decoding_iter for result in harness.results(1)] == [1, 2, 3, 4, 5]
    assert [result.decoding_iter for result in harness.results(2)] == [5]
    replayed = structs.replace(make_request(3, 4, 5), replay=replay_after([1, 2]))
    harness.serve(replayed)
    assert [result.decoding_iter for result in harness.results(3)] == [5]


def test_the_memory_is_looked_at_seldom() -> None:
    looks: list[tuple[int, int, int]] = []

    def look() -> tuple[int, int, int]:
        looks.append((len(looks), 0, 0))
        return looks[-1]

    memory = MemoryUsage(look)
    found = [memory.at(now)[0] for now in (5, 5 + MEMORY_NS - 1, 5 + MEMORY_NS, 6 + MEMORY_NS)]
    assert found == [0, 0, 1, 1]
    assert MEMORY_NS >= 1_000_000_000, "statistics of torch's allocators take longer than a step's other host work"
