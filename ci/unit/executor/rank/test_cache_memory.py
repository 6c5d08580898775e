"""When a rank on a CPU takes the memory of its KV cache: before it is ready, or beside its first steps.

Run: pytest ci/unit/executor/rank/test_cache_memory.py
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from real_engine import PATIENCE, starting

from inflight.config import EngineConfig
from inflight.distributed.joining import OneRank
from inflight.distributed.rank_group import SingleRank
from inflight.executor.rank.assembly import load_model_runner
from inflight.executor.wire.launch import Launch
from inflight.runtime.model_runner import ModelRunner

TOKENS, FRACTION = {"max_tokens_in_paged_kv_cache": 4096}, {"kv_cache_free_gpu_mem_fraction": 0.5}
TOKEN_BYTES = 2 * 6 * 4 * 32 * 2
"""Of a token of the default model: keys and values, layers, heads, elements, bytes of each."""


@pytest.mark.parametrize(
    ("how", "options", "is_deferred"),
    [
        ("launch", {}, True),
        ("launch", TOKENS, False),
        ("launch", FRACTION, False),
        ("launch", {**TOKENS, "spare_ranks": 1}, True),
        ("relaunch", FRACTION, True),
        ("in process", {}, False),
    ],
)
def test_a_size_that_somebody_chose_is_taken_before_the_first_launch_is_ready(
    how: str, options: dict[str, Any], is_deferred: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = EngineConfig(gpt_model_path=str(tmp_path), **options)
    launch = Launch.of(tmp_path, config, OneRank(), is_relaunch=how == "relaunch")
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ModelRunner, "load", lambda *_, **options: asked.update(options))
    load_model_runner(config, SingleRank(), launch=None if how == "in process" else launch)
    assert asked["defers_cache"] is is_deferred


@pytest.mark.slow
def test_memory_that_a_rank_did_not_wait_for_is_taken_without_any_request() -> None:
    with starting() as start:
        engine = start(max_tokens_in_paged_kv_cache="0", max_batch_size="64", max_seq_len="2048")
        num_bytes = engine.executor.limits.kv_cache_tokens * TOKEN_BYTES
        assert num_bytes > 300 * 2**20, "what a rank needs beside its cache is less"
        deadline = time.monotonic() + PATIENCE
        while _own_memory(engine.executor.engine_pids()) < num_bytes:
            assert time.monotonic() < deadline, "it was not taken"
            time.sleep(0.05)
        assert len(engine.generate([[1, 2, 3]], 4)[0]) == 4


def _own_memory(pids: list[int]) -> int:
    """Resident bytes of these processes that are no files'."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
