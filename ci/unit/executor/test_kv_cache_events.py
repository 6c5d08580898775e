"""Events of the KV cache and the time that its durations count on, as they travel between leader, ranks and fronts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cache_model import CacheModel
from calls import Caller
from fake_rank import load_fake_runner
from harness import make_request

from inflight.batch_manager.event_buffer import EventBuffer
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.in_process import InProcessExecutor
from inflight.executor.rank.leader.request_book import CLOCK_SECONDS, RequestBook
from inflight.executor.wire.messages import KvCacheEvents, decode_from_leader, encode
from inflight.kv_cache_events import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiff,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)
from inflight.kv_cache_retention import KvCacheRetentionConfig

PATIENCE = 100.0


@contextmanager
def engine(**options: int) -> Iterator[Caller]:
    executor = InProcessExecutor(
        EngineConfig(max_batch_size=4, max_num_tokens=64, tokens_per_block=4, **options), load_fake_runner
    )
    executor.start()
    yield Caller(executor)
    executor.shutdown()


def wait_for(caller: Caller, count: int) -> list[KVCacheEvent]:
    events: list[KVCacheEvent] = []
    while len(events) < count:
        found = caller.executor.get_kv_cache_events(PATIENCE)
        assert found, f"only {events}"
        events += found
    return events


def test_the_first_event_is_that_the_cache_was_created() -> None:
    with engine(event_buffer_max_size=100) as caller:
        (event,) = wait_for(caller, 1)
        assert event.event_id == 0 and isinstance(event.data, KVCacheCreatedData)
        assert event.data.num_blocks_per_cache_level == [20_000, 0]


def test_stored_blocks_tell_the_tokens_of_prompt_and_answer() -> None:
    with engine(event_buffer_max_size=100) as caller:
        wait_for(caller, 1)
        request = caller.request(list(range(10)), 12)
        caller.serve(request)
        model = CacheModel()
        model._next_id = 1
        while sum(len(known.prefix) == 20 for known in model.blocks.values()) < 1:
            model.follow(wait_for(caller, 1))
        tokens = (*range(10), *caller.tokens[request.request_id])
        assert sorted(known.prefix for known in model.blocks.values()) == [tokens[:end] for end in (4, 8, 12, 16, 20)]


def test_a_full_ring_drops_the_oldest_and_leaves_a_gap() -> None:
    buffer = EventBuffer(2)
    for number in range(5):
        buffer.created([number])
    assert [event.event_id for event in buffer.take()] == [3, 4]
    buffer.created([5])
    assert [event.event_id for event in buffer.take()] == [5] and buffer.take() == []


def test_nothing_is_noted_unless_asked() -> None:
    with engine() as caller:
        caller.serve(caller.request(list(range(10)), 12))
        assert caller.executor.get_kv_cache_events(0.0) == []


@pytest.mark.parametrize(
    "data",
    [
        KVCacheCreatedData(num_blocks_per_cache_level=[4, 2]),
        KVCacheStoredData(
            parent_hash=None, blocks=[KVCacheStoredBlockData(block_hash=2**64 - 1, tokens=[1], priority=35)]
        ),
        KVCacheRemovedData(block_hashes=[1, 2]),
        KVCacheUpdatedData(block_hash=1, cache_level=KVCacheEventDiff(0, 1)),
        KVCacheUpdatedData(block_hash=1, priority=KVCacheEventDiff(35, 90)),
    ],
)
def test_events_arrive_as_they_were_sent(
    data: KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData,
) -> None:
    message = KvCacheEvents([KVCacheEvent(event_id=3, data=data)])
    assert decode_from_leader(encode(message)) == message


def test_ranks_are_told_the_time_once_a_request_needs_it() -> None:
    now = [50.0]
    book = RequestBook(clock=lambda: now[0])
    plain = KvCacheRetentionConfig(decode_retention_priority=90)
    book.submit(b"front", make_request(1, 3, 3, kv_cache_retention_config=plain))
    assert book.time_to_tell() == 0
    timed = KvCacheRetentionConfig(decode_duration_ms=50)
    book.submit(b"front", make_request(2, 3, 3, kv_cache_retention_config=timed))
    assert book.time_to_tell() == 50_000
    assert book.time_to_tell() == 0, "it is not told in every iteration"
    now[0] += CLOCK_SECONDS
    assert book.time_to_tell() == 50_100


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("secondary_offload_min_priority", 101, "secondary_offload_min_priority must be at most 100, got 101"),
        ("kv_cache_host_memory_bytes", -1, "kv_cache_host_memory_bytes must not be negative"),
        ("event_buffer_max_size", 2**21, "event_buffer_max_size must be at most"),
    ],
)
def test_a_wrong_configuration_is_refused(key: str, value: int, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig.from_parameters({key: str(value)})
    assert sentence in str(caught.value)


def test_host_memory_without_reuse_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs enable_kv_cache_reuse"):
        EngineConfig(kv_cache_host_memory_bytes=1, enable_kv_cache_reuse=False)
