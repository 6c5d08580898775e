"""The line in which an engine is described to its operator."""

from __future__ import annotations

from inflight.engine_description import EngineDescription
from inflight.request_limits import RequestLimits

LIMITS = RequestLimits(vocab_size=7, max_seq_len=2048, max_input_len=2047, kv_cache_tokens=8192, max_batch_size=64)


def test_ranks_that_share_the_work_are_told() -> None:
    engine = EngineDescription(
        device="cuda",
        device_name="H100",
        architecture="LlamaForCausalLM",
        layers="native",
        dtype="bfloat16",
        weight_dtype="int4",
        kv_cache_dtype="fp8",
        num_ranks=4,
        tensor_parallel_size=2,
        data_parallel_size=2,
    )
    assert engine.summary(LIMITS) == (
        "LlamaForCausalLM on cuda (H100), native layers; 4 ranks, tensor_parallel_size 2, data_parallel_size 2; "
        "dtype bfloat16, weights int4, KV cache fp8 of 8192 tokens a replica; max_batch_size 64, max_seq_len 2048"
    )
