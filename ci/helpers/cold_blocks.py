"""Seeded histories in which memory is short and prompts part anywhere: blocks go to the host, come back, are copied in
part; and so do states of sequences, which every other history has. Denser than what a state machine draws."""

from __future__ import annotations

import random

from cache_model import CacheModel
from harness import Harness, make_request

from inflight.batch_manager.event_buffer import EventBuffer
from inflight.config import SchedulerPolicy
from inflight.errors import StepFailed
from inflight.kv_cache_retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from inflight.result import FinishReason

MAX_SEQ_LEN = 48


def serve_history(seed: int) -> Harness:
    """Serve history number `seed`, checking tokens, books and events on the way; returns what served it."""
    rng = random.Random(seed)
    block_size = rng.choice([2, 4, 8])
    failing = {rng.randint(20, 80)} if rng.random() < 0.3 else set()
    harness = Harness(
        policy=rng.choice(list(SchedulerPolicy)),
        block_size=block_size,
        num_blocks=-(-(MAX_SEQ_LEN - 1) // block_size) + rng.randint(0, 24 // block_size),
        max_batch_size=rng.randint(1, 5),
        max_num_tokens=rng.randint(5, 40),
        max_seq_len=MAX_SEQ_LEN,
        num_state_slots=rng.choice([1, 4, 12]) if seed % 2 else None,
        num_host_state_slots=rng.choice([1, 5, 30]),
        state_interval=rng.choice([1, 2]) * block_size,
        kv_cache={
            "enable_partial_reuse": rng.random() < 0.7,
            "copy_on_partial_reuse": rng.random() < 0.7,
            "num_host_blocks": rng.choice([0, 2, 8, 30]),
            "min_offload_priority": rng.choice([0, 36]),
            "events": EventBuffer(1 << 20),
        },
        runner={"fail_collect": failing.__contains__},
    )
    model, now_ms, num_requests = CacheModel(), 0, 0
    stems = [[rng.randint(0, 96) for _ in range(30)] for _ in range(3)]
    for _ in range(120):
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            num_requests += 1
            stem = rng.choice(stems)
            harness.submit(
                make_request(
                    num_requests,
                    [*stem[: rng.randint(0, 30)], *(rng.randint(0, 3) for _ in range(rng.randint(1, 6)))],
                    rng.randint(1, 10),
                    cache_salt=rng.choice(["", "", "a"]),
                    num_return_sequences=rng.choice([1, 1, min(2, harness.scheduler.max_batch_size)]),
                    kv_cache_retention_config=_retention(rng),
                )
            )
        if rng.random() < 0.1 and num_requests:
            harness.stops = {rng.randint(1, num_requests)}
        if rng.random() < 0.2:
            now_ms += rng.choice([10, 100])
            harness.manager.note_time(now_ms)
        harness.step()
        model.follow(harness.manager.take_kv_cache_events())
        model.check(harness.kv_cache)
    harness.run_until_idle()
    for request_id, request in harness.requests.items():
        assert harness.num_finals(request_id) == 1
        _, _, error = harness.responses[request_id][-1]
        for index in range(request.num_return_sequences):
            tokens, expected = harness.tokens(request_id, index), harness.expected(request_id, index)
            ends = [result.finish_reason for result in harness.results(request_id, index)][-1:]
            was_cut = error is not None or ends == [FinishReason.CANCELLED]
            assert tokens == (expected[: len(tokens)] if was_cut else expected)
        assert error is None or (isinstance(error, StepFailed) and failing)
    assert harness.kv_cache.num_used_blocks == 0
    return harness


def _retention(rng: random.Random) -> KvCacheRetentionConfig | None:
    if rng.random() < 0.5:
        return None
    end = rng.choice([None, 7, 20])
    first = TokenRangeRetentionConfig(
        token_start=0, token_end=end, priority=rng.choice([0, 35, 70, 100]), duration_ms=rng.choice([None, 50, 500])
    )
    return KvCacheRetentionConfig(
        token_range_retention_configs=[first], decode_retention_priority=rng.choice([0, 35, 60])
    )
