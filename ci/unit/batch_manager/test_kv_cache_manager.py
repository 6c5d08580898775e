"""KVCacheManager: what a sequence is given, what it shares, and what it leaves behind for others."""

from __future__ import annotations

from typing import Any

import pytest
from harness import make_request

from inflight.batch_manager.active_request import ActiveRequest
from inflight.batch_manager.event_buffer import EventBuffer
from inflight.batch_manager.kv_cache_manager import KVCacheManager, Prefix
from inflight.batch_manager.sequence import Sequence, SequenceStatus
from inflight.prompt_tuning import EmbeddingTable, PromptTuningConfig, virtual_tokens
from inflight.scheduler_output import NO_BLOCK

PROMPT = list(range(10))


def make_manager(num_blocks: int = 8, block_size: int = 4, enable_reuse: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=block_size, hash_key=b"k", enable_reuse=enable_reuse)


def make_sequence(prompt: list[int] = PROMPT, **options: str) -> Sequence:
    return Sequence(make_request(1, prompt, 20, **options), max_seq_len=64)


def start(manager: KVCacheManager, sequence: Sequence) -> list[int]:
    """Compute the whole prompt in one step; returns the blocks that came from the cache."""
    prefix = manager.find_prefix(sequence)
    num_tokens = len(sequence.token_ids) - prefix.num_tokens
    assert manager.allocate_slots(sequence, num_tokens, prefix.block_ids) is not None
    sequence.num_computed_tokens += num_tokens
    manager.cache_blocks(sequence)
    return prefix.block_ids


def test_a_sequence_gets_just_the_blocks_it_fills() -> None:
    manager, sequence = make_manager(), make_sequence()
    start(manager, sequence)
    assert len(sequence.block_ids) == 3
    assert manager.allocate_slots(sequence, 2) == []
    sequence.num_computed_tokens += 2
    assert manager.allocate_slots(sequence, 1) == sequence.block_ids[3:]
    assert len(sequence.block_ids) == 4
    manager.check([sequence])


def test_nothing_changes_when_memory_is_short() -> None:
    manager = make_manager(num_blocks=4)
    first, second = make_sequence(), make_sequence([90, 91, 92, 93, 94])
    start(manager, first)
    assert manager.allocate_slots(second, 5) is None
    assert second.block_ids == [] and manager.num_free_blocks == 1
    manager.check([first])


def test_an_equal_prefix_is_shared_in_full_blocks() -> None:
    manager = make_manager()
    first, second = make_sequence(), make_sequence([*PROMPT[:8], 50, 51])
    start(manager, first)
    assert start(manager, second) == first.block_ids[:2]
    assert second.block_ids[:2] == first.block_ids[:2] and second.block_ids[2] != first.block_ids[2]
    assert manager.num_used_blocks == 4
    assert manager.num_reused_blocks == 2
    manager.check([first, second])


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_full_hit_leaves_a_token_to_compute(length: int) -> None:
    manager = make_manager()
    prompt = list(range(length))
    start(manager, make_sequence(prompt))
    again = make_sequence(prompt)
    assert len(start(manager, again)) == length // 4 - 1
    assert again.num_computed_tokens == length


def test_a_freed_prefix_is_found_again_and_counted_as_free() -> None:
    manager = make_manager()
    first, second = make_sequence(), make_sequence()
    start(manager, first)
    blocks = first.block_ids[:2]
    manager.free(first)
    assert manager.num_free_blocks == 8 and first.block_ids == [] and first.num_computed_tokens == 0
    prefix = manager.find_prefix(second)
    assert prefix.block_ids == blocks
    assert manager.num_blocks_taken(10, prefix) == 3, "reviving two and allocating one"


def test_a_prefix_held_by_another_costs_nothing() -> None:
    manager = make_manager()
    first, second = make_sequence(), make_sequence()
    start(manager, first)
    assert manager.num_blocks_taken(10, manager.find_prefix(second)) == 1


def test_salts_do_not_share() -> None:
    manager = make_manager()
    start(manager, make_sequence(cache_salt="alice"))
    assert manager.find_prefix(make_sequence(cache_salt="bob")).block_ids == []
    assert len(manager.find_prefix(make_sequence(cache_salt="alice")).block_ids) == 2


def test_a_prefix_is_offered_only_as_far_as_its_tokens_are_known() -> None:
    manager = make_manager()
    sequence = make_sequence(PROMPT[:7])
    start(manager, sequence)
    sequence.num_computed_tokens += 1  # a decode of a token that is still on the device only
    manager.cache_blocks(sequence)
    assert sequence.num_cached_blocks == 1
    sequence.token_ids.append(7)
    manager.cache_blocks(sequence)
    assert sequence.num_cached_blocks == 2
    assert manager.find_prefix(make_sequence()).block_ids == sequence.block_ids[:2]


def siblings(prompt: list[int] = PROMPT, count: int = 2, **options: Any) -> list[Sequence]:
    request = make_request(1, prompt, 20, num_return_sequences=count, **options)
    return ActiveRequest(request, max_seq_len=64, arrival_time_ns=0).sequences


def run(sequence: Sequence) -> None:
    sequence.status = SequenceStatus.RUNNING


@pytest.mark.parametrize("enable_reuse", [True, False])
def test_a_sibling_shares_full_blocks_and_holds_the_one_that_the_prompt_ends_in(enable_reuse: bool) -> None:
    manager = make_manager(enable_reuse=enable_reuse)
    first, second = siblings()
    start(manager, first)
    run(first)
    prefix = manager.find_prefix(second)
    assert prefix == Prefix(9, [], first)
    assert manager.num_blocks_taken(10, prefix) == 1
    manager.fork(second, first)
    new = manager.allocate_slots(second, 1)
    assert new is not None and second.block_ids == [*first.block_ids[:2], *new]
    assert second.tail_blocks == first.block_ids[2:] != new and second.num_computed_tokens == 9
    manager.check([first, second])
    manager.free(first)
    manager.check([second])
    assert manager.num_used_blocks == 4, "the block that is still to be copied stays"
    manager.drop_tail(second)
    manager.check([second])
    manager.free(second)
    assert manager.num_used_blocks == 0


def test_a_siblings_prompt_is_not_hashed_again() -> None:
    manager = make_manager()
    first, second = siblings()
    start(manager, first)
    run(first)
    manager.fork(second, manager.find_prefix(second).source or second)
    assert len(first.block_hashes) == 2 and second.block_hashes == first.block_hashes
    manager.free(second)
    manager.free(first)


def test_a_held_block_goes_back_with_the_sequence_that_never_copied_it() -> None:
    manager = make_manager()
    first, second = siblings()
    start(manager, first)
    manager.fork(second, first)
    manager.free(first)
    manager.free(second)
    manager.check([])


@pytest.mark.parametrize("length", [5, 9])
def test_nothing_is_copied_where_the_last_token_begins_a_block(length: int) -> None:
    manager = make_manager()
    first, second = siblings(PROMPT[:length])
    start(manager, first)
    manager.fork(second, first)
    assert not second.tail_blocks and second.block_ids == first.block_ids[:-1]


def test_only_a_running_sibling_with_the_whole_prompt_is_a_source() -> None:
    manager = make_manager(enable_reuse=False)
    first, second = siblings()
    manager.allocate_slots(first, 10)
    run(first)
    first.num_computed_tokens = 8
    assert manager.find_prefix(second) == Prefix(0, [])
    first.num_computed_tokens = 9
    assert manager.find_prefix(second).source is first
    first.status = SequenceStatus.PAUSED
    assert manager.find_prefix(second) == Prefix(0, [])


def test_a_longer_cached_prefix_goes_before_a_siblings_prompt() -> None:
    manager = make_manager()
    first, second = siblings(PROMPT[:6])
    second.token_ids += [50, 51, 52]
    start(manager, second)
    cached = second.block_ids[:2]
    manager.free(second)
    start(manager, first)
    run(first)
    assert manager.find_prefix(second) == Prefix(8, cached)


def test_distrusted_blocks_are_given_to_nobody() -> None:
    manager = make_manager()
    sequence = make_sequence()
    start(manager, sequence)
    manager.free(sequence, trusted=False)
    assert manager.find_prefix(make_sequence()).block_ids == []
    manager.check([])


def test_reuse_can_be_switched_off() -> None:
    manager = make_manager(enable_reuse=False)
    start(manager, make_sequence())
    assert start(manager, make_sequence()) == []
    assert manager.num_used_blocks == 6


def test_the_account_of_a_sequence() -> None:
    manager = make_manager()
    start(manager, make_sequence(PROMPT[:5]))
    sequence = make_sequence()
    manager.allocate_slots(sequence, 6, manager.find_prefix(sequence).block_ids)
    manager.count_missed(sequence)
    metrics = sequence.perf_metrics()
    assert metrics.kv_cache_reused_blocks == 1
    assert metrics.kv_cache_alloc_new_blocks == 2
    assert metrics.kv_cache_alloc_total_blocks == 3
    assert metrics.kv_cache_missed_blocks == 1


def test_a_table_of_embeddings_is_digested_once_for_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    digest, digested = PromptTuningConfig.digest, []

    def count(config: PromptTuningConfig) -> bytes:
        digested.append(config)
        return digest(config)

    monkeypatch.setattr(PromptTuningConfig, "digest", count)
    table = EmbeddingTable(dtype="float32", shape=(10, 1), data=bytes(40))
    prompt = virtual_tokens(table, 100)
    tuning = PromptTuningConfig(embedding_table=table)
    manager = KVCacheManager(
        num_blocks=8, block_size=4, hash_key=b"k", enable_partial_reuse=True, events=EventBuffer(100)
    )
    first, second = siblings(prompt, prompt_tuning_config=tuning)
    start(manager, first)
    for _ in range(3):
        manager.find_prefix(second)
    start(manager, second)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert digested == [tuning]


def windowed(*windows: int, num_blocks: int = 16, **options: int) -> tuple[KVCacheManager, Sequence]:
    """A sequence of 20 tokens, all of which are computed, in blocks of 4 of each group of layers."""
    manager = KVCacheManager(
        num_blocks=num_blocks, block_size=4, hash_key=b"k", windows=windows, max_num_tokens=20, **options
    )
    sequence = make_sequence(list(range(20)))
    start(manager, sequence)
    return manager, sequence


def test_blocks_that_a_window_has_passed_are_given_back_and_stay_cached() -> None:
    manager, sequence = windowed(0, 6)
    of_window = sequence.block_ids[1::2]
    assert manager.give_back(sequence) == [1, 3, 5], (
        "the next token sees those from 14 on, in case the last one is redone"
    )
    assert sequence.block_ids[1::2] == [NO_BLOCK] * 3 + of_window[3:]
    assert manager.num_used_blocks == 7 and not manager.take_transfers().scrubbed, "they led to a token"
    manager.check([sequence])
    prefix = manager.find_prefix(make_sequence(list(range(20))))
    assert prefix.num_tokens == 16 and prefix.block_ids[1::2] == [NO_BLOCK, NO_BLOCK, *of_window[2:4]]
    assert manager.give_back(sequence) == []


def test_blocks_that_a_prompt_has_passed_are_scrubbed() -> None:
    manager, sequence = windowed(6)
    sequence.num_prefill_tokens = 30
    passed = sequence.block_ids[:3]
    assert manager.give_back(sequence) == [0, 1, 2] and manager.take_transfers().scrubbed == passed


@pytest.mark.parametrize("num_host_blocks", [0, 3])
def test_nothing_of_a_sequence_that_is_not_trusted_can_be_found(num_host_blocks: int) -> None:
    """Neither what it holds nor what it has given back, here or on the host."""
    manager, sequence = windowed(6, num_blocks=6, num_host_blocks=num_host_blocks)
    manager.give_back(sequence)
    other = make_sequence(list(range(50, 64 if num_host_blocks else 58)))
    start(manager, other)
    assert bool(manager.num_used_host_blocks) is bool(num_host_blocks), "it takes blocks that were given back"
    manager.take_transfers()
    manager.free(sequence, trusted=False)
    manager.check([other])
    assert manager.find_prefix(make_sequence(list(range(20)))).num_tokens == 0
    assert manager.num_used_host_blocks == 0 and len(manager._pool._table) == other.num_cached_blocks
