"""What somebody knows of a KV cache who has seen nothing but its events."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.prefix_table import HASH_BYTES
from inflight.kv_cache_events import (
    DEVICE_LEVEL,
    HOST_LEVEL,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheRemovedData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)


@dataclass
class Known:
    prefix: tuple[int, ...]
    """All tokens up to the end of the block; empty if the block before it was not known."""
    level: int
    priority: int


class CacheModel:
    def __init__(self) -> None:
        self.blocks: dict[int, Known] = {}
        self.num_blocks_per_level: list[int] = []
        self._next_id = 0

    def follow(self, events: list[KVCacheEvent]) -> None:
        """Each event must fit what is known: nothing is stored twice, or removed or changed without being there."""
        for event in events:
            assert event.event_id == self._next_id, "an event is missing"
            self._next_id += 1
            self._follow(event.data)

    def _follow(self, data: KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData) -> None:
        if isinstance(data, KVCacheCreatedData):
            assert not self.blocks
            self.num_blocks_per_level = data.num_blocks_per_cache_level
        elif isinstance(data, KVCacheStoredData):
            parent = () if data.parent_hash is None else self._prefix(data.parent_hash)
            for block in data.blocks:
                assert block.block_hash not in self.blocks, "a block was stored twice"
                prefix = (*parent, *block.tokens) if parent is not None else None
                self.blocks[block.block_hash] = Known(prefix or (), block.cache_level, block.priority)
                parent = prefix
        elif isinstance(data, KVCacheRemovedData):
            for block_hash in data.block_hashes:
                del self.blocks[block_hash]
        else:
            known = self.blocks[data.block_hash]
            if data.cache_level is not None:
                assert known.level == data.cache_level.old_value
                known.level = data.cache_level.new_value
            if data.priority is not None:
                assert known.priority == data.priority.old_value
                known.priority = data.priority.new_value

    def _prefix(self, block_hash: int) -> tuple[int, ...] | None:
        known = self.blocks.get(block_hash)
        return known.prefix or None if known is not None else None

    def check(self, kv_cache: KVCacheManager) -> None:
        """Raise AssertionError unless this is what is cached."""
        assert self.num_blocks_per_level == [kv_cache.num_blocks, kv_cache.num_host_blocks]
        actual = sorted(
            (HOST_LEVEL if block.block_id >= kv_cache.num_blocks else DEVICE_LEVEL, block.priority)
            for block in kv_cache._pool._table
            if len(block.block_hash) == HASH_BYTES  # of the first group of layers: events tell of no other
        )
        assert sorted((known.level, known.priority) for known in self.blocks.values()) == actual
