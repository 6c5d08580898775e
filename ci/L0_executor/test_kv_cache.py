"""The KV cache's features on real ranks, one and two: the same tokens whatever was kept, moved or reused in part.

pytest ci/L0_executor/test_kv_cache.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_model import CacheModel

from inflight import (
    EngineConfig,
    Executor,
    IterationStats,
    KVCacheEvent,
    KvCacheRetentionConfig,
    KVCacheUpdatedData,
    Request,
    TokenRangeRetentionConfig,
)
from inflight.run_directory import RUN_DIRECTORY
from inflight.stats import KvCacheStats

CHECKPOINT = Path(__file__).resolve().parents[2] / "model_repository" / "llm" / "1" / "checkpoint"
PATIENCE = 120
TO_HOST, TO_DEVICE = (0, 1), (1, 0)
STEM = [(position * 37) % 500 + 20 for position in range(70)]
BRANCHES = [[*STEM[:20], *((number * 91 + position * 7) % 500 + 20 for position in range(60))] for number in range(6)]
PROMPTS = [STEM, *BRANCHES, *([*STEM[: 33 + number], 30, 40, 50] for number in range(4)), STEM, BRANCHES[0]]
"""The last one's blocks were given up long before, and are in host memory whatever a clock says."""


def serve(num_ranks: int, **changes: object) -> tuple[list[list[int]], KvCacheStats, list[KVCacheEvent]]:
    """The tokens of all prompts, one after the other, and what is told of the cache in the end."""
    config = EngineConfig(
        dtype="float32",
        tensor_parallel_size=num_ranks,
        max_batch_size=4,
        max_seq_len=128,
        num_threads=1,
        **changes,  # type: ignore[arg-type]
    )
    keep = KvCacheRetentionConfig(
        token_range_retention_configs=[TokenRangeRetentionConfig(token_start=0, priority=80, duration_ms=200)],
        decode_duration_ms=1,
    )
    found: list[list[int]] = []
    iterations: list[IterationStats] = []
    events: list[KVCacheEvent] = []
    with Executor(CHECKPOINT, config) as executor:
        for number, prompt in enumerate(PROMPTS):
            request = Request(
                input_token_ids=prompt, max_tokens=12, kv_cache_retention_config=keep if number % 3 == 0 else None
            )
            (response,) = executor.await_responses(executor.enqueue_request(request), timeout=PATIENCE)
            assert response.result is not None, response.error_msg
            found.append(response.result.output_token_ids)
        # Statistics and events come a moment after the responses.
        while sum(stats.num_completed_requests for stats in iterations) < len(PROMPTS):
            arrived = executor.get_latest_iteration_stats(timeout=PATIENCE)
            assert arrived, "statistics of the last iterations did not come"
            iterations += arrived
        while config.event_buffer_max_size and moves(events) != {TO_HOST, TO_DEVICE}:
            more = executor.get_kv_cache_events(timeout=PATIENCE)
            assert more, "blocks went to the host and came back"
            events += more
    return found, iterations[-1].kv_cache_stats, events


def moves(events: list[KVCacheEvent]) -> set[tuple[int, int]]:
    """(level, next level) of the blocks that were moved."""
    levels = [event.data.cache_level for event in events if isinstance(event.data, KVCacheUpdatedData)]
    return {(level.old_value, level.new_value) for level in levels if level is not None}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_tokens_are_those_of_an_engine_without_reuse(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    expected, _, _ = serve(1, max_tokens_in_paged_kv_cache=1024, enable_kv_cache_reuse=False)
    found, stats, events = serve(
        num_ranks,
        max_tokens_in_paged_kv_cache=160,
        enable_partial_reuse=True,
        kv_cache_host_memory_bytes=64 * 2**20,
        event_buffer_max_size=10_000,
    )
    assert found == expected
    model = CacheModel()
    model.follow(events)
    assert model.num_blocks_per_level[0] == 10 and model.num_blocks_per_level[1] > 10
    assert moves(events) == {TO_HOST, TO_DEVICE}
    assert stats.partially_reused_blocks and stats.offloaded_blocks >= stats.onboarded_blocks > 0
