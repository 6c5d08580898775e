"""The JSON of the batch manager's stats callback, which /metrics shows.

Its keys are exactly those of TensorRT-LLM's batch manager, because dashboards and the nv_trt_llm_* metric families map
onto them one to one. The numbers are those of :class:`inflight.stats.IterationStats`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inflight.stats import IterationStats


class BatchManagerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration in the batch manager's words. Memory in bytes."""

    timestamp: str = msgspec.field(name="Timestamp")
    """%m-%d-%Y %H:%M:%S.%f, local time."""
    iteration_counter: int = msgspec.field(name="Iteration Counter")
    active_request_count: int = msgspec.field(name="Active Request Count")
    max_request_count: int = msgspec.field(name="Max Request Count")
    runtime_cpu_memory: int = msgspec.field(name="Runtime CPU Memory Usage")
    runtime_gpu_memory: int = msgspec.field(name="Runtime GPU Memory Usage")
    runtime_pinned_memory: int = msgspec.field(name="Runtime Pinned Memory Usage")
    max_kv_cache_blocks: int = msgspec.field(name="Max KV cache blocks")
    free_kv_cache_blocks: int = msgspec.field(name="Free KV cache blocks")
    used_kv_cache_blocks: int = msgspec.field(name="Used KV cache blocks")
    tokens_per_kv_cache_block: int = msgspec.field(name="Tokens per KV cache block")
    reused_kv_cache_blocks: int = msgspec.field(name="Reused KV cache blocks")
    fraction_used_kv_cache_blocks: float = msgspec.field(name="Fraction used KV cache blocks")
    scheduled_requests: int = msgspec.field(name="Scheduled Requests")
    context_requests: int = msgspec.field(name="Context Requests")
    generation_requests: int = msgspec.field(name="Generation Requests")
    total_context_tokens: int = msgspec.field(name="Total Context Tokens")
    micro_batch_id: int = msgspec.field(name="MicroBatch ID")
    paused_requests: int = msgspec.field(name="Paused Requests")
    waiting_requests: int = msgspec.field(name="Waiting Requests")

    @classmethod
    def of(cls, stats: IterationStats) -> BatchManagerStats:
        """The same iteration in these words."""
        kv_cache, batching = stats.kv_cache_stats, stats.inflight_batching_stats
        return cls(
            timestamp=stats.timestamp,
            iteration_counter=stats.iter,
            active_request_count=stats.num_active_requests,
            max_request_count=stats.max_num_active_requests,
            runtime_cpu_memory=stats.cpu_mem_usage,
            runtime_gpu_memory=stats.gpu_mem_usage,
            runtime_pinned_memory=stats.pinned_mem_usage,
            max_kv_cache_blocks=kv_cache.max_num_blocks,
            free_kv_cache_blocks=kv_cache.free_num_blocks,
            used_kv_cache_blocks=kv_cache.used_num_blocks,
            tokens_per_kv_cache_block=kv_cache.tokens_per_block,
            reused_kv_cache_blocks=kv_cache.reused_blocks,
            fraction_used_kv_cache_blocks=kv_cache.used_num_blocks / kv_cache.max_num_blocks,
            scheduled_requests=batching.num_scheduled_requests,
            context_requests=batching.num_context_requests,
            generation_requests=batching.num_gen_requests,
            total_context_tokens=batching.num_ctx_tokens,
            micro_batch_id=batching.micro_batch_id,
            paused_requests=batching.num_paused_requests,
            waiting_requests=batching.num_waiting_requests,
        )

    @classmethod
    def total(cls, replicas: Sequence[BatchManagerStats]) -> BatchManagerStats:
        """An engine's, of the newest iterations of its replicas, at least one: sums, but for what all have in common.
        The timestamp is the newest one's."""
        newest = max(replicas, key=lambda stats: stats.timestamp)
        totals = {name: sum(getattr(stats, name) for stats in replicas) for name in _SUMMED}
        fraction = totals["used_kv_cache_blocks"] / totals["max_kv_cache_blocks"]
        return msgspec.structs.replace(newest, **totals, fraction_used_kv_cache_blocks=fraction)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> BatchManagerStats:
        return msgspec.json.decode(text, type=cls)


_SUMMED = tuple(
    name
    for name in BatchManagerStats.__struct_fields__
    if name not in ("timestamp", "tokens_per_kv_cache_block", "fraction_used_kv_cache_blocks", "micro_batch_id")
)
