"""The statistics of an engine that serves random requests: what the page's events are made of, without an engine.

Not a scheduler: sequences come, wait for one of the rows, are prefilled in chunks, decode, are paused at times, and go.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random

from inflight.stats import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStage,
    RequestStats,
    RequestStatsPerIteration,
)

STEP_MS = 25
CHUNK = 192
BLOCK = 16


@dataclass
class Played:
    """One sequence."""

    id: int
    num_prompt: int
    num_wanted: int
    num_computed: int = 0
    num_tokens: int = 0
    pause: int = 0
    is_running: bool = False

    @property
    def stage(self) -> RequestStage:
        if self.num_tokens >= self.num_wanted:
            return RequestStage.GENERATION_COMPLETE
        if self.num_tokens:
            return RequestStage.GENERATION_IN_PROGRESS
        return RequestStage.CONTEXT_IN_PROGRESS if self.num_computed else RequestStage.QUEUED

    @property
    def num_blocks(self) -> int:
        return 0 if self.pause else -(-(self.num_computed + self.num_tokens) // BLOCK)

    def stats(self) -> RequestStats:
        return RequestStats(
            id=self.id,
            stage=self.stage,
            context_prefill_position=self.num_computed,
            num_generated_tokens=self.num_tokens,
            avg_num_decoded_tokens_per_iter=1.0,
            scheduled=self.is_running,
            paused=self.pause > 0,
            alloc_total_blocks_per_request=self.num_blocks,
            alloc_new_blocks_per_request=self.num_blocks,
            reused_blocks_per_request=self.id % 5,
            missed_blocks_per_request=self.num_blocks,
        )


class PlayedStatistics:
    def __init__(self, *, seed: int, num_rows: int, begin: datetime) -> None:
        self._random = Random(seed)
        self._num_rows = num_rows
        self._time = begin
        self._iter = 0
        self._sequences: list[Played] = []
        self._num_made = 0

    def step(self) -> tuple[IterationStats, RequestStatsPerIteration]:
        """The next iteration."""
        self._iter += 1
        self._time += timedelta(milliseconds=STEP_MS)
        num_new = self._join()
        started = [each for each in self._sequences if each.num_computed]
        fresh = [each for each in self._sequences if not each.num_computed][: self._num_rows - len(started)]
        running = [each for each in [*started, *fresh] if not self._is_paused(each)]
        prefills = [each for each in running if not each.num_tokens]
        for each in self._sequences:
            each.is_running = each in running
        for each in running:
            each.num_computed = min(each.num_computed + CHUNK, each.num_prompt)
            each.num_tokens += each.num_computed == each.num_prompt
        ended = [each for each in self._sequences if each.stage is RequestStage.GENERATION_COMPLETE]
        requests = [each.stats() for each in [*ended, *(each for each in self._sequences if each not in ended)]]
        iteration = self._iteration(num_new, len(running), len(prefills), len(ended))
        self._sequences = [each for each in self._sequences if each not in ended]
        return iteration, RequestStatsPerIteration(iter=self._iter, request_stats=requests)

    def _join(self) -> int:
        burst = 0.16 if self._iter // 120 % 2 else 0.07
        if len(self._sequences) >= self._num_rows + 3 or self._random.random() > burst:
            return 0
        self._num_made += 1
        prompt, wanted = self._random.choice((60, 400, 1500)), self._random.randrange(30, 260)
        self._sequences.append(Played(4100 + self._num_made, prompt, wanted))
        return 1

    def _is_paused(self, sequence: Played) -> bool:
        if not sequence.pause and sequence.num_tokens > 20 and self._random.random() < 0.002:
            sequence.pause = 40
        sequence.pause = max(sequence.pause - 1, 0)
        return sequence.pause > 0

    def _iteration(self, num_new: int, num_running: int, num_prefills: int, num_ended: int) -> IterationStats:
        used = sum(each.num_blocks for each in self._sequences)
        num_paused = sum(each.pause > 0 for each in self._sequences)
        return IterationStats(
            timestamp=self._time.strftime("%m-%d-%Y %H:%M:%S.%f"),
            iter=self._iter,
            iter_latency_ms=STEP_MS - 2.0,
            new_active_requests_queue_latency_ms=num_new * self._random.random() * 40,
            num_new_active_requests=num_new,
            num_active_requests=len(self._sequences) - num_ended,
            num_queued_requests=max(len(self._sequences) - self._num_rows, 0),
            num_completed_requests=num_ended,
            max_num_active_requests=self._num_rows,
            max_batch_size_static=self._num_rows,
            max_batch_size_runtime=self._num_rows,
            max_num_tokens_static=2048,
            max_num_tokens_runtime=2048,
            gpu_mem_usage=0,
            cpu_mem_usage=0,
            pinned_mem_usage=0,
            kv_cache_stats=KvCacheStats(
                max_num_blocks=1024,
                free_num_blocks=1024 - used,
                used_num_blocks=used,
                tokens_per_block=BLOCK,
                alloc_total_blocks=self._num_made * 40,
                alloc_new_blocks=self._num_made * 30,
                reused_blocks=self._num_made * 10,
                missed_blocks=self._num_made * 17,
                max_num_host_blocks=512,
                used_num_host_blocks=min(self._num_made * 3, 400),
            ),
            inflight_batching_stats=InflightBatchingStats(
                num_scheduled_requests=num_running,
                num_context_requests=num_prefills,
                num_gen_requests=num_running - num_prefills,
                num_paused_requests=num_paused,
                num_waiting_requests=len(self._sequences) - num_running,
                num_ctx_tokens=num_prefills * CHUNK,
                micro_batch_id=0,
                avg_num_decoded_tokens_per_iter=1.0,
            ),
        )
