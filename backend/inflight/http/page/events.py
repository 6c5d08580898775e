"""The events that the page draws the live batch from, made of the engine's statistics. Knows no HTTP.

One `LiveBatch` serves all viewers: each event holds the whole state, so that a viewer may join or miss one at any time.
What statistics do not tell is left out: a sequence's row in the batch (lanes are numbered here), the length of its
prompt, the blocks that it holds at the moment, and which of the free blocks still hold a cached prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from datetime import datetime
from enum import Enum

import msgspec

from inflight.stats import IterationStats, KvCacheStats, RequestStage, RequestStats, RequestStatsPerIteration


class RowState(str, Enum):
    """What a sequence is doing."""

    QUEUED = "queued"
    """The ranks have accepted it; it was in no step yet."""
    PREFILL = "prefill"
    """Its prompt is computed, or, after a pause, computed again. It lasts until the first token is on the host."""
    DECODE = "decode"
    PAUSED = "paused"
    """It gave its blocks back and waits to be continued."""
    DONE = "done"


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A state that began within the event's time."""

    time_ms: float
    state: RowState


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. It is listed once more in the event in which it ends."""

    lane: int
    """Its own while it is listed; from 0, the lowest that was free."""
    id: str
    """The request's id, as text: JavaScript's numbers do not hold 64 bits."""
    sequence_index: int
    state: RowState
    """At the event's time."""
    changes: list[Change]
    """Oldest first. The first one of a sequence that is new says when it joined."""
    num_prompt_tokens: int
    """That are computed."""
    num_generated_tokens: int
    num_reused_blocks: int
    """Blocks of its prompt that held a cached prefix."""


class KvBlocks(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    used: int
    """By sequences. The others are free, whether they hold a cached prefix or not."""
    host_total: int
    """Slots for cold blocks in host memory."""
    host_used: int
    tokens_per_block: int
    hit_rate: float
    """Share of the prompts' full blocks that were found in the cache, since the start."""


class BatchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened since the event before it, and the state at its end. Times in ms since 1970 of the leader's clock,
    rates for each second. Means are None if nothing happened that they could be of."""

    time_ms: float
    duration_ms: float
    """Since the event before; 0 for the first one."""
    num_iterations: int
    step_ms: float
    """Duration of an iteration, mean."""
    rows: list[Row] | None
    """By lane. None if the engine makes no statistics of requests (request_stats_max_iterations is 0)."""
    max_rows: int
    """Sequences that may be active at the same time."""
    num_active: int
    """Requests that the ranks have accepted."""
    num_queued: int
    """Requests that wait on the leader before."""
    num_waiting: int
    """Sequences that were accepted and are not in the newest step, paused ones included."""
    num_paused: int
    num_prefills: int
    """Sequences in the newest step whose prompt is computed."""
    num_decodes: int
    num_completed: int
    """Requests that ended since the event before."""
    prefill_tokens_per_s: float
    generated_tokens_per_s: float
    """0 without `rows`."""
    queue_ms: float | None
    """How long requests that were accepted had waited on the leader, mean."""
    ttft_ms: float | None
    """From the beginning of the iteration that accepted a sequence to its first token on the host, mean. Add queue_ms
    for what a client waits."""
    itl_ms: float | None
    """Between two tokens of a sequence, mean."""
    kv_blocks: KvBlocks


def server_sent_event(event: BatchEvent) -> bytes:
    """The event as it goes over HTTP."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


class LiveBatch:
    """Makes events of successive statistics. Takes no lock."""

    def __init__(self) -> None:
        self._time_ms: float | None = None  # of the newest statistics
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._free_lanes: list[int] = []  # a heap
        self._num_lanes = 0

    def advance(
        self, iterations: Sequence[IterationStats], requests: Sequence[RequestStatsPerIteration]
    ) -> BatchEvent | None:
        """The next event: of all statistics since the last call, oldest first. None if there were no iterations. The
        statistics of requests may be of fewer iterations; they are told apart by the iterations' numbers."""
        if not iterations:
            return None
        ends = {each.iter: (_time_ms(each.timestamp), each.iter_latency_ms) for each in iterations}
        latest = iterations[-1]
        end_ms = ends[latest.iter][0]
        tokens = _Tokens()
        for several in requests:
            time_ms, duration_ms = ends.get(several.iter, (end_ms, 0.0))
            self._note(several.request_stats, time_ms, time_ms - duration_ms, tokens)
        event = self._event(iterations, end_ms, tokens, self._rows() if requests else None)
        self._time_ms = end_ms
        self._free_ended()
        return event

    def _note(self, found: list[RequestStats], time_ms: float, began_ms: float, tokens: _Tokens) -> None:
        """One iteration's requests."""
        seen = set()
        for stats in found:
            key = (stats.id, stats.sequence_index)
            seen.add(key)
            if key not in self._lanes:
                self._lanes[key] = _Lane(self._take_lane(), began_ms, stats)
            self._lanes[key].note(stats, time_ms, tokens)
        for key in self._lanes.keys() - seen:
            self._lanes[key].end(time_ms)  # its last statistics were missed, or its ranks are gone

    def _rows(self) -> list[Row]:
        return sorted((lane.row() for lane in self._lanes.values()), key=lambda row: row.lane)

    def _take_lane(self) -> int:
        if self._free_lanes:
            return heapq.heappop(self._free_lanes)
        self._num_lanes += 1
        return self._num_lanes - 1

    def _free_ended(self) -> None:
        for key, lane in list(self._lanes.items()):
            if lane.state is RowState.DONE:
                del self._lanes[key]
                heapq.heappush(self._free_lanes, lane.number)
            else:
                lane.changes.clear()

    def _event(
        self, iterations: Sequence[IterationStats], end_ms: float, tokens: _Tokens, rows: list[Row] | None
    ) -> BatchEvent:
        latest, batching = iterations[-1], iterations[-1].inflight_batching_stats
        duration_ms = 0.0 if self._time_ms is None else max(end_ms - self._time_ms, 0.0)
        seconds = duration_ms / 1000
        num_new = sum(each.num_new_active_requests for each in iterations)
        num_prompt_tokens = sum(each.inflight_batching_stats.num_ctx_tokens for each in iterations)
        return BatchEvent(
            time_ms=end_ms,
            duration_ms=duration_ms,
            num_iterations=len(iterations),
            step_ms=sum(each.iter_latency_ms for each in iterations) / len(iterations),
            rows=rows,
            max_rows=latest.max_num_active_requests,
            num_active=latest.num_active_requests,
            num_queued=latest.num_queued_requests,
            num_waiting=batching.num_waiting_requests,
            num_paused=batching.num_paused_requests,
            num_prefills=batching.num_context_requests,
            num_decodes=batching.num_gen_requests,
            num_completed=sum(each.num_completed_requests for each in iterations),
            prefill_tokens_per_s=num_prompt_tokens / seconds if seconds else 0.0,
            generated_tokens_per_s=tokens.num_generated / seconds if seconds else 0.0,
            queue_ms=_mean(sum(each.new_active_requests_queue_latency_ms for each in iterations), num_new),
            ttft_ms=_mean(sum(tokens.first_ms), len(tokens.first_ms)),
            itl_ms=_mean(tokens.between_ms, tokens.num_between),
            kv_blocks=_kv_blocks(latest.kv_cache_stats),
        )


class _Tokens:
    """The tokens that came within an event."""

    def __init__(self) -> None:
        self.num_generated = 0
        self.first_ms: list[float] = []
        """How long sequences took to their first token."""
        self.between_ms = 0.0
        """Time between tokens, added up over `num_between` of them."""
        self.num_between = 0


class _Lane:
    """One sequence, as far as statistics told."""

    def __init__(self, number: int, joined_ms: float, stats: RequestStats) -> None:
        self.number = number
        self.state: RowState | None = None
        self.changes: list[Change] = []
        self._stats = stats
        self._num_tokens = 0
        self._token_ms = joined_ms  # of the newest token; before the first, when it joined
        self._joined_ms = joined_ms

    def note(self, stats: RequestStats, time_ms: float, tokens: _Tokens) -> None:
        self._stats = stats
        self._change(_state(stats), time_ms)
        num_new = stats.num_generated_tokens - self._num_tokens
        if num_new <= 0:
            return
        tokens.num_generated += num_new
        if self._num_tokens:
            tokens.between_ms += time_ms - self._token_ms
            tokens.num_between += num_new
        else:
            tokens.first_ms.append(time_ms - self._joined_ms)
        self._num_tokens, self._token_ms = stats.num_generated_tokens, time_ms

    def end(self, time_ms: float) -> None:
        self._change(RowState.DONE, time_ms)

    def _change(self, state: RowState, time_ms: float) -> None:
        if state is not self.state:
            # What statistics show first began when the sequence joined.
            self.changes.append(Change(self._joined_ms if self.state is None else time_ms, state))
            self.state = state

    def row(self) -> Row:
        assert self.state is not None, "a lane is made when its sequence is noted"
        stats = self._stats
        return Row(
            lane=self.number,
            id=str(stats.id),
            sequence_index=stats.sequence_index,
            state=self.state,
            changes=list(self.changes),
            num_prompt_tokens=stats.context_prefill_position,
            num_generated_tokens=stats.num_generated_tokens,
            num_reused_blocks=stats.reused_blocks_per_request,
        )


def _state(stats: RequestStats) -> RowState:
    if stats.stage is RequestStage.GENERATION_COMPLETE:
        return RowState.DONE
    if stats.paused:
        return RowState.PAUSED
    if stats.stage is RequestStage.QUEUED:
        return RowState.QUEUED
    # A prompt counts as computed when its last step is launched, which for a short one is before anybody could see it.
    is_prefill = stats.stage is RequestStage.CONTEXT_IN_PROGRESS or not stats.num_generated_tokens
    return RowState.PREFILL if is_prefill else RowState.DECODE


def _kv_blocks(stats: KvCacheStats) -> KvBlocks:
    return KvBlocks(
        total=stats.max_num_blocks,
        used=stats.used_num_blocks,
        host_total=stats.max_num_host_blocks,
        host_used=stats.used_num_host_blocks,
        tokens_per_block=stats.tokens_per_block,
        hit_rate=stats.cache_hit_rate,
    )


def _time_ms(timestamp: str) -> float:
    return datetime.strptime(timestamp, "%m-%d-%Y %H:%M:%S.%f").timestamp() * 1000


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
