"""Cached blocks when memory is short: which are given up, which come back, and what is copied of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
from cold_blocks import serve_history
from fake_network import expected_output
from harness import Harness, make_request

from inflight.batch_manager.block_pool import BlockPool
from inflight.batch_manager.eviction_queue import EvictionQueue
from inflight.batch_manager.prefix_table import CachedBlock
from inflight.batch_manager.state_slots import StateSlots
from inflight.errors import InvalidRequest
from inflight.kv_cache_retention import KvCacheRetentionConfig, Retention, TokenRangeRetentionConfig
from inflight.request import Request

NUM_HISTORIES = 40 * max(int(os.environ.get("INFLIGHT_FUZZ_EXAMPLES", "100")) // 100, 1)
TokenRange = TokenRangeRetentionConfig
PROMPT = [(position * 7) % 90 for position in range(13)]


def retention(priority: int, duration_ms: int | None = None, start: int = 0, end: int | None = None) -> TokenRange:
    return TokenRange(token_start=start, token_end=end, priority=priority, duration_ms=duration_ms)


def keeping(request: Request, *ranges: TokenRange, decode: int = 35) -> Request:
    config = KvCacheRetentionConfig(token_range_retention_configs=list(ranges), decode_retention_priority=decode)
    return make_request(
        request.request_id, request.input_token_ids, request.max_tokens, kv_cache_retention_config=config
    )


def num_reused(harness: Harness, request_id: int) -> int:
    metrics = harness.final(request_id).request_perf_metrics
    assert metrics is not None
    return metrics.kv_cache_reused_blocks


def prefilled(harness: Harness, since: int = 0) -> int:
    """Prompt tokens that were computed from launch `since` on."""
    return sum(work.num_tokens for step in harness.runner.launched[since:] for work in step.rows if work.is_prefill)


@pytest.mark.parametrize("block", range(10))
def test_any_history_keeps_the_books_and_the_tokens(block: int) -> None:
    """See cold_blocks. Blocks must have moved both ways, or the histories show nothing."""
    num_onboarded = num_partial = num_states = 0
    for seed in range(block * NUM_HISTORIES // 10, (block + 1) * NUM_HISTORIES // 10):
        harness = serve_history(seed)
        num_onboarded += harness.kv_cache.num_onboarded_blocks
        num_partial += harness.kv_cache.num_partially_reused_blocks
        num_states += sum(len(step.state_onboards) for step in harness.runner.launched)
    assert num_onboarded and num_partial and num_states


# -- which are given up ------------------------------------------------------------------------------------------------


def test_the_queue_gives_up_the_lowest_priority_and_the_longest_wait() -> None:
    queue = EvictionQueue()
    blocks = [CachedBlock(number, bytes([number]), b"", [number]) for number in range(5)]
    for block, priority in zip(blocks, [35, 0, 100, 0, 35], strict=True):
        block.priority = priority
        queue.add(block)
    queue.remove(blocks[4])
    assert queue.lowest_priority == 0 and len(queue) == 4
    assert [queue.pop().block_id for _ in range(4)] == [1, 3, 0, 2]
    assert len(queue) == 0


def crowd_out(harness: Harness, first_id: int) -> None:
    """Requests that fill the memory with other prefixes."""
    harness.serve(*(make_request(first_id + i, [91 + i, *range(40)], 3) for i in range(2)))


@pytest.mark.parametrize(("priority", "is_kept"), [(None, False), (35, False), (36, True), (100, True), (0, False)])
def test_a_higher_priority_outlives_what_is_used_later(priority: int | None, is_kept: bool) -> None:
    harness = Harness(num_blocks=20, max_num_tokens=64)
    request = make_request(1, PROMPT, 2)
    harness.serve(request if priority is None else keeping(request, retention(priority)))
    crowd_out(harness, 10)
    harness.serve(make_request(2, PROMPT, 2))
    assert (num_reused(harness, 2) == 3) is is_kept
    assert harness.tokens(2) == harness.expected(2)


def test_only_the_blocks_of_a_range_are_kept() -> None:
    harness = Harness(num_blocks=20, max_num_tokens=64)
    harness.serve(keeping(make_request(1, PROMPT, 2), retention(90, end=5)))
    crowd_out(harness, 10)
    harness.serve(make_request(2, PROMPT, 2))
    assert num_reused(harness, 2) == 2, "the first tokens of two blocks are in the range"


def test_generated_tokens_have_a_priority_of_their_own() -> None:
    harness = Harness(num_blocks=20, max_num_tokens=64)
    harness.serve(keeping(make_request(1, PROMPT[:4], 10), retention(80), decode=80))
    crowd_out(harness, 10)
    harness.serve(make_request(2, [*PROMPT[:4], *harness.tokens(1)], 2))
    assert num_reused(harness, 2) == 3


def test_a_lower_priority_is_given_up_before_older_blocks() -> None:
    harness = Harness(num_blocks=16, max_num_tokens=64)
    harness.serve(make_request(1, PROMPT, 2))
    harness.serve(keeping(make_request(3, [80, *PROMPT], 2), retention(0), decode=0))
    harness.serve(make_request(10, [91, *range(46)], 3))
    harness.serve(make_request(2, PROMPT, 2), make_request(4, [80, *PROMPT], 2))
    assert (num_reused(harness, 2), num_reused(harness, 4)) == (3, 0)


@pytest.mark.parametrize(("passed_ms", "is_kept"), [(99, True), (100, False)])
def test_a_priority_ends_so_long_after_the_last_use(passed_ms: int, is_kept: bool) -> None:
    harness = Harness(num_blocks=20, max_num_tokens=64)
    harness.manager.note_time(5000)
    harness.serve(keeping(make_request(1, PROMPT, 2), retention(90, duration_ms=100)))
    harness.manager.note_time(5000 + passed_ms)
    crowd_out(harness, 10)
    harness.serve(make_request(2, PROMPT, 2))
    assert (num_reused(harness, 2) == 3) is is_kept


def test_use_renews_a_duration_and_the_last_word_counts() -> None:
    pool = BlockPool(2, hash_key=b"k")
    (block_id,) = pool.allocate(1)
    block = pool.cache(block_id, b"hash", [1], retention=Retention(90, 100))
    assert block is not None
    pool.free([block_id])
    pool.note_time(60)
    pool.share([block_id])
    pool.note_time(170)
    assert block.priority == 90, "it is in use"
    pool.free([block_id])
    pool.note_time(260)
    assert block.priority == 90
    pool.note_time(270)
    assert block.priority == 35
    pool.retain(block_id, Retention(80, 10))
    pool.note_time(280)
    assert block.priority == 35
    pool.retain(block_id, Retention(80, 10))
    pool.retain(block_id, Retention(20, None))
    pool.note_time(10_000)
    assert block.priority == 20
    pool.check([])


def test_stale_expiries_do_not_pile_up() -> None:
    pool = BlockPool(2, hash_key=b"k")
    (block_id,) = pool.allocate(1)
    pool.cache(block_id, b"hash", [1], retention=Retention(90, 100))
    for _ in range(1000):
        pool.free([block_id])
        pool.share([block_id])
    assert len(pool._expiries) < 100


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"token_range_retention_configs": [retention(101)]}, "priority of a retention token range must be between"),
        ({"token_range_retention_configs": [retention(35, 0)]}, "must be at least 1 ms, got 0"),
        ({"token_range_retention_configs": [retention(35, start=-1)]}, "must rise from position 0"),
        ({"token_range_retention_configs": [retention(35, start=4, end=4)]}, "must end behind its start 4, got 4"),
        ({"token_range_retention_configs": [retention(35), retention(35, start=9)]}, "must not overlap"),
        ({"token_range_retention_configs": [retention(35, end=9), retention(35, start=8)]}, "must not overlap"),
        ({"token_range_retention_configs": [retention(35)] * 1025}, "more than 1024"),
        ({"decode_retention_priority": -1}, "retention_decode_priority must be between 0 and 100, got -1"),
        ({"decode_duration_ms": 0}, "duration of retention_decode_priority must be at least 1 ms"),
    ],
)
def test_what_makes_no_sense_is_refused(config: dict[str, object], sentence: str) -> None:
    harness = Harness()
    harness.serve(make_request(1, PROMPT, 2, kv_cache_retention_config=KvCacheRetentionConfig(**config)))  # type: ignore[arg-type]
    assert isinstance(harness.error(1), InvalidRequest) and sentence in str(harness.error(1))


def test_what_is_said_of_a_block_is_what_is_said_of_its_first_token() -> None:
    config = KvCacheRetentionConfig(
        token_range_retention_configs=[retention(10, start=4, end=8), retention(20, 7, start=12)],
        decode_retention_priority=30,
    )
    said = [config.of_block(start, 20) for start in (0, 4, 7, 8, 12, 19, 20, 40)]
    assert said == [None, (10, None), (10, None), None, (20, 7), (20, 7), (30, None), (30, None)]


# -- reuse of a part ---------------------------------------------------------------------------------------------------


def partial_harness(**options: object) -> Harness:
    return Harness(max_num_tokens=64, kv_cache={"enable_partial_reuse": True, **options})


@pytest.mark.parametrize("num_equal", [1, 4, 5, 6, 7, 8, 11])
def test_a_prompt_is_computed_from_where_it_parts(num_equal: int) -> None:
    harness = partial_harness()
    harness.serve(make_request(1, PROMPT, 2))
    launches = harness.runner.num_launches
    harness.serve(make_request(2, [*PROMPT[:num_equal], 95, 96, 95], 4))
    assert harness.tokens(2) == harness.expected(2)
    assert prefilled(harness, launches) == 3
    assert harness.kv_cache.num_partially_reused_blocks == (num_equal % 4 > 0)
    harness.kv_cache.check([])


def test_the_same_prompt_again_computes_one_token() -> None:
    harness = partial_harness()
    harness.serve(make_request(1, PROMPT[:11], 6))
    launches = harness.runner.num_launches
    harness.serve(make_request(2, PROMPT[:11], 6))
    assert prefilled(harness, launches) == 1
    assert harness.tokens(2) == harness.tokens(1) == harness.expected(2)


def test_the_longest_of_many_matches_is_taken() -> None:
    harness = partial_harness()
    for number in range(12):
        harness.serve(make_request(number, [50, 51 + number % 3, 60 + number % 4, number, 7], 1))
    for number in range(12):
        launches = harness.runner.num_launches
        harness.serve(make_request(100 + number, [50, 51 + number % 3, 60 + number % 4, 90, 7], 1))
        assert prefilled(harness, launches) == 2, "three tokens are the same"
        assert harness.tokens(100 + number) == harness.expected(100 + number)


def test_a_part_is_taken_from_a_block_in_use_only_where_that_is_allowed() -> None:
    for allowed in (True, False):
        harness = partial_harness(copy_on_partial_reuse=allowed)
        harness.submit(make_request(1, PROMPT, 12))
        harness.step()
        harness.serve(make_request(2, [*PROMPT[:6], 95], 3))
        assert harness.tokens(2) == harness.expected(2)
        assert harness.kv_cache.num_partially_reused_blocks == allowed


def test_a_part_is_not_taken_from_another_salt() -> None:
    harness = partial_harness()
    harness.serve(make_request(1, PROMPT, 2, cache_salt="a"))
    harness.serve(make_request(2, [*PROMPT[:6], 95], 3, cache_salt="b"))
    assert harness.kv_cache.num_partially_reused_blocks == 0


def test_a_request_that_needs_all_memory_starts_without_a_copy() -> None:
    """Copying would take one block more, the one that is copied from."""
    harness = Harness(num_blocks=8, max_num_tokens=64, kv_cache={"enable_partial_reuse": True})
    harness.serve(make_request(1, PROMPT, 2))
    harness.serve(make_request(2, [PROMPT[0], 95, 96], 30))
    assert harness.tokens(2) == harness.expected(2)
    assert harness.kv_cache.num_partially_reused_blocks == 0


def test_what_was_copied_behind_the_common_tokens_is_scrubbed() -> None:
    harness = partial_harness()
    harness.serve(make_request(1, PROMPT, 2))
    harness.serve(make_request(2, [*PROMPT[:6], 95], 1))
    ((_, target),) = harness.runner.launched[-1].block_copies
    assert harness.runner.launched[-1].scrubbed_block_ids == [target]


# -- host memory -------------------------------------------------------------------------------------------------------


def test_blocks_go_to_the_host_and_come_back() -> None:
    harness = Harness(num_blocks=20, max_num_tokens=64, kv_cache={"num_host_blocks": 30})
    harness.serve(make_request(1, PROMPT, 2))
    crowd_out(harness, 10)
    assert harness.kv_cache.num_offloaded_blocks >= 3 and harness.kv_cache.num_onboarded_blocks == 0
    launches = harness.runner.num_launches
    harness.serve(make_request(2, PROMPT, 6))
    assert harness.tokens(2) == expected_output(make_request(1, PROMPT, 6), 64)
    assert num_reused(harness, 2) == 3 == harness.kv_cache.num_onboarded_blocks
    assert prefilled(harness, launches) == 1
    assert len(harness.runner.launched[launches].onboards) == 3


@pytest.mark.parametrize(("priority", "is_kept"), [(49, False), (50, True)])
def test_blocks_of_low_priority_do_not_go_to_the_host(priority: int, is_kept: bool) -> None:
    harness = Harness(num_blocks=20, max_num_tokens=64, kv_cache={"num_host_blocks": 80, "min_offload_priority": 50})
    harness.serve(keeping(make_request(1, PROMPT, 2), retention(priority)))
    for first_id in (10, 20, 30):
        harness.serve(
            *(keeping(make_request(first_id + i, [first_id + i, *range(40)], 3), retention(60)) for i in range(2))
        )
    harness.serve(make_request(2, PROMPT, 2))
    assert (num_reused(harness, 2) == 3) is is_kept


def test_the_beginning_of_a_host_block_is_copied_straight_to_the_device() -> None:
    harness = Harness(num_blocks=20, max_num_tokens=64, kv_cache={"num_host_blocks": 60, "enable_partial_reuse": True})
    harness.serve(make_request(1, PROMPT, 2))
    crowd_out(harness, 10)
    crowd_out(harness, 20)
    launches = harness.runner.num_launches
    harness.serve(make_request(2, [*PROMPT[:3], 95, 96], 3))
    assert harness.tokens(2) == harness.expected(2)
    assert prefilled(harness, launches) == 2
    harness.serve(make_request(3, PROMPT, 2))
    assert num_reused(harness, 3) == 3, "the block stayed where it was"


def test_nothing_comes_back_from_before_a_failing_step() -> None:
    harness = Harness(
        num_blocks=20,
        max_num_tokens=64,
        kv_cache={"num_host_blocks": 30},
        runner={"fail_collect": lambda step: step == 12},
    )
    harness.serve(make_request(1, PROMPT, 2))
    crowd_out(harness, 10)
    crowd_out(harness, 20)
    while harness.runner.num_launches < 13:
        harness.serve(make_request(50 + harness.runner.num_launches, [5], 4))
    harness.serve(make_request(2, PROMPT, 2))
    assert harness.tokens(2) == harness.expected(2)
    assert num_reused(harness, 2) == 0 and harness.kv_cache.num_used_host_blocks == 0


def test_a_block_that_is_given_up_before_it_came_back_stays_on_the_host() -> None:
    pool = BlockPool(1, hash_key=b"k", num_host_blocks=1)
    (block_id,) = pool.allocate(1)
    pool.cache(block_id, b"hash", [1])
    pool.free([block_id])
    pool.allocate(1)
    assert pool.lookup(b"hash", [1]) == 1, "the host's block"
    assert pool.take_transfers().offloads == [(0, 0)]
    pool.free([0])
    assert pool.share([1]) == [0]
    pool.free([0])
    pool.allocate(1)
    assert pool.lookup(b"hash", [1]) == 1
    transfers = pool.take_transfers()
    assert (transfers.offloads, transfers.onboards) == ([], [])
    pool.check([[0]])


def state_harness(**options: Any) -> Harness:
    return Harness(max_num_tokens=64, num_state_slots=3, num_host_state_slots=8, **options)


def test_states_go_to_the_host_and_sequences_start_on_them_there() -> None:
    harness = state_harness(kv_cache={"num_host_blocks": 60}, num_blocks=20)
    harness.serve(make_request(1, PROMPT, 2))
    crowd_out(harness, 10)
    assert any(step.state_offloads for step in harness.runner.launched)
    for number in (2, 3):
        launches = harness.runner.num_launches
        harness.serve(make_request(number, PROMPT, 6))
        first = harness.runner.launched[launches]
        assert harness.tokens(number) == harness.expected(number) and num_reused(harness, number) == 3
        assert len(first.state_onboards) == 1 and not first.state_copies, "it stays on the host"


def test_a_state_goes_with_its_block_from_the_host_too() -> None:
    harness = state_harness(num_blocks=20)
    harness.serve(make_request(1, PROMPT, 2))
    crowd_out(harness, 10)
    crowd_out(harness, 20)
    assert harness.kv_cache.states is not None
    cached = {block.block_hash for block in harness.kv_cache._pool._table}
    assert harness.kv_cache.states.slots._slots.keys() <= cached
    harness.serve(make_request(2, PROMPT, 2))
    assert num_reused(harness, 2) == 0 and harness.tokens(2) == harness.expected(2)


@pytest.mark.parametrize(("priority", "is_kept"), [(49, False), (50, True)])
def test_a_state_goes_to_the_host_if_its_block_may(priority: int, is_kept: bool) -> None:
    harness = state_harness(kv_cache={"num_host_blocks": 60, "min_offload_priority": 50})
    harness.serve(keeping(make_request(1, PROMPT, 2), retention(priority)))
    for number in range(10, 13):
        harness.serve(keeping(make_request(number, [number, *PROMPT], 2), retention(60)))
    harness.serve(make_request(2, PROMPT, 2))
    assert (num_reused(harness, 2) == 3) is is_kept


def test_a_slot_of_the_host_that_is_read_is_given_away_behind_the_step() -> None:
    slots = StateSlots(2, 5, 1)
    first, second = slots.take(bool), slots.take(bool)
    for slot, block_hash in ((first, b"a"), (second, b"b")):
        slots.enter(slot, block_hash)
        slots.release(slot)
    assert slots.take(bool) == first and slots.take_transfers() == ([(first, 0)], [])
    on_host = slots.hold_snapshot(b"a")
    assert slots.is_on_host(on_host)
    slots.read(on_host, 3)
    assert slots.take(bool) == second and b"b" not in slots, "there is no room on the host"
    assert b"a" in slots and slots.take_transfers() == ([], [(0, 3)])
    slots.enter(second, b"a")
    slots.check([first, second])
    assert slots.hold_snapshot(b"a") == second, "what is on the device is nearer"


def test_content_that_is_not_trusted_neither_goes_nor_stays() -> None:
    pool = BlockPool(1, hash_key=b"k", num_host_blocks=1)
    (block_id,) = pool.allocate(1)
    pool.cache(block_id, b"hash", [1])
    pool.forget([block_id])
    pool.free([block_id])
    pool.allocate(1)
    assert pool.take_transfers().offloads == [] and pool.lookup(b"hash", [1]) is None
