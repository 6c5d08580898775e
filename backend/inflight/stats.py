"""The Executor's statistics: of every iteration, and of every request in it.

Fields have TensorRT-LLM's names in snake case. What this engine has no part for is left out: encoder and cross
attention, static batches, a tuner of batch sizes, disaggregated serving. Where TensorRT-LLM
counts requests of a batch, a request of several sequences counts once for each of them, as it does there.
"""

from __future__ import annotations

import enum

import msgspec


class KvCacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of the KV cache: now, and how those taken so far were found."""

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int
    """Blocks that sequences were given since the start: new ones and reused ones."""
    alloc_new_blocks: int
    """Of these, the ones that were empty."""
    reused_blocks: int
    """Of these, the ones that held a cached prefix."""
    missed_blocks: int
    """Full blocks of prompts that were not found in the cache since the start."""
    partially_reused_blocks: int = 0
    """Of the empty ones, those whose beginning was copied from a cached block."""
    max_num_host_blocks: int = 0
    """Slots for cold blocks in host memory."""
    used_num_host_blocks: int = 0
    offloaded_blocks: int = 0
    """Blocks that were copied to host memory since the start."""
    onboarded_blocks: int = 0
    """Blocks that were copied from there since the start. Those that came back whole count as reused, too."""

    @property
    def cache_hit_rate(self) -> float:
        """Reused blocks as a share of those looked for; 0 before the first."""
        return hit_rate(self.reused_blocks, self.missed_blocks)


class InflightBatchingStats(msgspec.Struct, frozen=True, kw_only=True):
    """The step that the iteration launched; all zero but for pauses and waits if it launched none."""

    num_scheduled_requests: int
    """Sequences in the step."""
    num_context_requests: int
    """Of these, the ones whose prompt is being computed."""
    num_gen_requests: int
    """Of these, the ones that decode."""
    num_paused_requests: int
    """Sequences that gave their blocks back and wait to be continued."""
    num_waiting_requests: int
    """Accepted sequences that are not in the step: paused ones, and those that wait for a row or for memory."""
    num_ctx_tokens: int
    """Prompt tokens of the step."""
    micro_batch_id: int
    """Always 0: there is one batch."""
    avg_num_decoded_tokens_per_iter: float
    """Tokens that a decoding sequence gets in this step, on average; 0 without such sequences."""


class SpecDecodingStats(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts whose step's results came in during the iteration."""

    num_draft_tokens: int
    """Drafts that were verified."""
    num_accepted_tokens: int
    """Of these, the ones that the output has."""
    num_requests_with_draft_tokens: int
    """Sequences that had any."""
    acceptance_length: float
    """Tokens that one of these got from its step, on average: the accepted drafts and one more."""
    iter_latency_ms: float = 0.0
    """Time that a draft model took: always 0, as there is none."""
    draft_overhead: float = 0.0
    """Its share of the iteration's time: always 0."""


class IterationStats(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one iteration that launched a step or answered a request's end. Memory in bytes, times in ms."""

    timestamp: str
    """%m-%d-%Y %H:%M:%S.%f, local time of the leader."""
    iter: int
    """Number of steps launched so far. An iteration that launches none, because it only answers, has the number of the
    one before."""
    iter_latency_ms: float
    """Duration of the iteration; the time in which the engine was idle before it does not count."""
    new_active_requests_queue_latency_ms: float = 0.0
    """Time that the requests which became active in this iteration had waited on the leader, added up."""
    num_new_active_requests: int
    num_active_requests: int
    num_queued_requests: int = 0
    """Requests of all fronts that wait on the leader."""
    num_completed_requests: int
    """Requests that had their final response in this iteration."""
    max_num_active_requests: int
    """Sequences that may be active at the same time."""
    max_batch_size_static: int
    max_batch_size_runtime: int
    max_num_tokens_static: int
    max_num_tokens_runtime: int
    gpu_mem_usage: int
    cpu_mem_usage: int
    pinned_mem_usage: int
    kv_cache_stats: KvCacheStats
    inflight_batching_stats: InflightBatchingStats
    spec_decoding_stats: SpecDecodingStats | None = None
    """None if the iteration got no results of drafts."""
    replica: int = 0
    """Of the engine (data_parallel_size), which counts its own iterations."""


class RequestStage(enum.IntEnum):
    """How far a request is."""

    QUEUED = 0
    """It was accepted by the ranks and has not been in a step."""
    CONTEXT_IN_PROGRESS = 2
    """Its prompt is being computed, or, after a pause, will be computed again."""
    GENERATION_IN_PROGRESS = 3
    GENERATION_COMPLETE = 4


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of a request at the end of an iteration."""

    id: int
    """The request's id."""
    sequence_index: int = 0
    stage: RequestStage
    context_prefill_position: int
    """Prompt tokens that are computed, or are being computed by a launched step."""
    num_generated_tokens: int
    """Tokens that have reached the host."""
    avg_num_decoded_tokens_per_iter: float
    """Generated tokens for each iteration in which it got some; 0 before the first."""
    scheduled: bool
    """Whether it is in the step of this iteration."""
    paused: bool
    """Whether it gave its blocks back and waits to be continued."""
    alloc_total_blocks_per_request: int
    alloc_new_blocks_per_request: int
    reused_blocks_per_request: int
    missed_blocks_per_request: int

    @property
    def kv_cache_hit_rate_per_request(self) -> float:
        """Reused blocks as a share of those looked for; 0 if none was."""
        return hit_rate(self.reused_blocks_per_request, self.missed_blocks_per_request)


class RequestStatsPerIteration(msgspec.Struct, frozen=True, kw_only=True):
    """All requests that were active in an iteration, also those that it completed. Requests that wait on the leader
    are not listed, so that the work of a step does not depend on their number: IterationStats counts them."""

    iter: int
    request_stats: list[RequestStats]
    replica: int = 0
    """As in IterationStats."""


def hit_rate(num_found: int, num_missed: int) -> float:
    """Share of what was found among what was looked for; 0 if nothing was."""
    return num_found / (num_found + num_missed) if num_found else 0.0
