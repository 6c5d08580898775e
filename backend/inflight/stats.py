"""One iteration's statistics: the JSON of the batch manager's stats callback.

The JSON's keys are exactly those of TensorRT-LLM's batch manager, because dashboards and the nv_trt_llm_* metric
families map onto them one to one.
"""

from __future__ import annotations

import msgspec


class IterationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Taken at the end of an iteration after which requests are still active. Memory in bytes."""

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

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> IterationStats:
        return msgspec.json.decode(text, type=cls)
