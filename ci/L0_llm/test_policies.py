"""Scheduler policies and prefix reuse change when a request is computed, never its tokens.

pytest ci/L0_llm/test_policies.py
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from server_metrics import KV_BLOCKS, OUTCOMES, Metrics, wait_for_rest
from server_process import ServerProcess
from waiting import until
from workload import Asked, alone, mixed_requests, together

from inflight_client import Client

KV_TOKENS = 256
LONG = [
    Asked.of(f"Once upon a time there was a little duck named {name}", max_tokens=200, end_id=-1, **how)
    for name, how in (
        ("Jack", {}),
        ("Rosa", {"temperature": 1.0, "seed": 5}),
        ("Zoë", {}),
        ("Max", {"temperature": 0.7, "top_k": 20, "seed": 6, "repetition_penalty": 1.1}),
        ("Lily", {}),
    )
]
"""Together four times what the small KV cache holds, and each fits into it."""


@pytest.fixture(scope="module")
def crowded_server() -> Iterator[ServerProcess]:
    """MAX_UTILIZATION with a KV cache far too small for the requests that it admits."""
    parameters = {
        "batch_scheduler_policy": "max_utilization",
        "max_tokens_in_paged_kv_cache": str(KV_TOKENS),
        "stats_check_period_ms": "10",
    }
    with ServerProcess(parameters=parameters) as running:
        yield running


@pytest.fixture(scope="module")
def static_server() -> Iterator[ServerProcess]:
    with ServerProcess(parameters={"batch_scheduler_policy": "static_batch", "max_batch_size": "4"}) as running:
        yield running


def test_paused_requests_go_on_to_the_tokens_they_have_alone(crowded_server: ServerProcess) -> None:
    with Client(crowded_server.grpc_url, timeout=120) as client:
        expected = alone(client, LONG)
        assert all(answer.num_output_tokens == 200 for answer in expected.values())
        answers = together(client, LONG, len(LONG))
        assert answers == [expected[asked] for asked in LONG]
        metrics = wait_for_rest(crowded_server)
        assert metrics.of(KV_BLOCKS, kv_cache_block_type="max") * 16 == KV_TOKENS


def test_requests_are_paused_when_memory_runs_out(crowded_server: ServerProcess) -> None:
    """Long requests run until a paused one is seen, so that the test cannot miss it."""
    seen = threading.Event()

    def keep_asking(asked: Asked) -> None:
        with Client(crowded_server.grpc_url, timeout=120) as client:
            while not seen.is_set():
                asked.answer(client)

    company = [threading.Thread(target=keep_asking, args=(asked,)) for asked in LONG]
    for thread in company:
        thread.start()
    try:
        name, label = "nv_trt_llm_inflight_batcher_metrics", {"inflight_batcher_specific_metric": "paused_requests"}
        until(lambda: Metrics(crowded_server).of(name, **label) > 0, "a request is paused")
    finally:
        seen.set()
        for thread in company:
            thread.join()
    wait_for_rest(crowded_server)


def test_a_second_equal_prompt_reuses_blocks_and_gets_the_same_tokens(server: ServerProcess, client: Client) -> None:
    asked = Asked.of(
        "A prompt that no other test has: the quick brown owl counts 1 2 3 4 5 6 7 8 9 sheep by the river.",
        max_tokens=24,
        end_id=-1,
    )

    started = Metrics(server).of(OUTCOMES)

    def reused(num_answers: int) -> float:
        """Blocks taken from the cache so far, once /metrics, which follows by a period, knows of the answers."""
        until(lambda: Metrics(server).of(OUTCOMES) >= started + num_answers, "the answers are counted")
        return wait_for_rest(server).of(KV_BLOCKS, kv_cache_block_type="reused")

    before = reused(0)
    first = asked.answer(client)
    between = reused(1)
    second = asked.answer(client)
    assert first == second
    assert first.num_input_tokens is not None
    shared = first.num_input_tokens // 16 - 1
    assert shared >= 1
    until(lambda: reused(2) - between >= shared, "the second prompt's blocks came from the cache")
    assert between - before <= 1


def test_static_batches_serve(static_server: ServerProcess, client: Client) -> None:
    requests = mixed_requests(14, seed=3)
    expected = alone(client, requests)
    with Client(static_server.grpc_url, timeout=120) as other:
        assert together(other, requests, len(requests)) == [expected[asked] for asked in requests]
    wait_for_rest(static_server)
