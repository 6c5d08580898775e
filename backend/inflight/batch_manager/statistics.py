"""The numbers of one iteration: what the KV cache, a step and a sequence look like to whoever reads statistics.

Called only when somebody will read them, on the leader alone. Knows neither the loop nor where they go.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.sequence import Sequence, SequenceStatus
from inflight.batch_manager.speculation.draft_count import DraftCount
from inflight.scheduler_output import RowWork
from inflight.stats import InflightBatchingStats, KvCacheStats, RequestStage, RequestStats, SpecDecodingStats

MEMORY_NS = 1_000_000_000
"""Shortest time between two looks at the memory: one reads files of the system and all statistics of torch's
allocators, which takes longer than the rest."""


class MemoryUsage:
    """Bytes that the runner uses: (host, device, pinned)."""

    def __init__(self, look: Callable[[], tuple[int, int, int]]) -> None:
        self._look = look
        self._found = (0, 0, 0)
        self._looked_ns: int | None = None

    def at(self, now_ns: int) -> tuple[int, int, int]:
        """As it is now, or was less than MEMORY_NS before."""
        if self._looked_ns is None or now_ns - self._looked_ns >= MEMORY_NS:
            self._found, self._looked_ns = self._look(), now_ns
        return self._found


def kv_cache_stats(kv_cache: KVCacheManager) -> KvCacheStats:
    """Its blocks now, and how those taken so far were found."""
    return KvCacheStats(
        max_num_blocks=kv_cache.num_blocks,
        free_num_blocks=kv_cache.num_free_blocks,
        used_num_blocks=kv_cache.num_used_blocks,
        tokens_per_block=kv_cache.block_size,
        alloc_total_blocks=kv_cache.num_allocated_blocks + kv_cache.num_reused_blocks,
        alloc_new_blocks=kv_cache.num_allocated_blocks,
        reused_blocks=kv_cache.num_reused_blocks,
        missed_blocks=kv_cache.num_missed_blocks,
        partially_reused_blocks=kv_cache.num_partially_reused_blocks,
        max_num_host_blocks=kv_cache.num_host_blocks,
        used_num_host_blocks=kv_cache.num_used_host_blocks,
        offloaded_blocks=kv_cache.num_offloaded_blocks,
        onboarded_blocks=kv_cache.num_onboarded_blocks,
    )


def batching_stats(rows: list[RowWork], *, num_paused: int, num_sequences: int) -> InflightBatchingStats:
    """`rows`: of the step that the iteration launched, if any. `num_sequences`: accepted and not finished."""
    # Nearly all rows of a full step bring the token that they sampled last, and sample one: these are not looked at.
    special = [work for work in rows if work.token_ids and (not work.is_chosen or work.num_sampled > 1)]
    prefills = [work for work in special if work.is_prefill]
    drafted = [work for work in special if not work.is_prefill]
    num_decodes = len(rows) - len(prefills)
    num_decoded = num_decodes - len(drafted) + sum(work.num_sampled for work in drafted)
    return InflightBatchingStats(
        num_scheduled_requests=len(rows),
        num_context_requests=len(prefills),
        num_gen_requests=num_decodes,
        num_paused_requests=num_paused,
        num_waiting_requests=num_sequences - len(rows),
        num_ctx_tokens=sum(work.num_tokens for work in prefills),
        micro_batch_id=0,
        avg_num_decoded_tokens_per_iter=num_decoded / num_decodes if num_decodes else 0.0,
    )


def spec_decoding_stats(count: DraftCount) -> SpecDecodingStats | None:
    """None if the iteration got no results of drafts."""
    if not count.num_sequences:
        return None
    return SpecDecodingStats(
        num_draft_tokens=count.num_draft_tokens,
        num_accepted_tokens=count.num_accepted_tokens,
        num_requests_with_draft_tokens=count.num_sequences,
        acceptance_length=1 + count.num_accepted_tokens / count.num_sequences,
    )


def request_stats(sequence: Sequence, rows: frozenset[int]) -> RequestStats:
    """`rows`: the numbers of the rows in the step that the iteration launched."""
    num_iters = sequence.num_decoding_iters
    return RequestStats(
        id=sequence.request.request_id,
        sequence_index=sequence.index,
        stage=_stage(sequence),
        context_prefill_position=_prefill_position(sequence),
        num_generated_tokens=sequence.num_output_tokens,
        avg_num_decoded_tokens_per_iter=sequence.num_output_tokens / num_iters if num_iters else 0.0,
        scheduled=sequence.row in rows,
        paused=sequence.status is SequenceStatus.PAUSED,
        alloc_total_blocks_per_request=sequence.num_allocated_blocks + sequence.num_reused_blocks,
        alloc_new_blocks_per_request=sequence.num_allocated_blocks,
        reused_blocks_per_request=sequence.num_reused_blocks,
        missed_blocks_per_request=sequence.num_missed_blocks,
    )


def _stage(sequence: Sequence) -> RequestStage:
    if sequence.is_finished:
        return RequestStage.GENERATION_COMPLETE
    if sequence.status is SequenceStatus.WAITING:
        return RequestStage.QUEUED
    return RequestStage.GENERATION_IN_PROGRESS if sequence.is_decoding else RequestStage.CONTEXT_IN_PROGRESS


def _prefill_position(sequence: Sequence) -> int:
    """A finished sequence has given its blocks back, and with them the count of computed tokens."""
    if sequence.is_finished and sequence.num_output_tokens:
        return sequence.num_prompt_tokens
    return min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
