"""KV cache events that nobody has fetched yet: a ring, of which the oldest fall out. Knows blocks, not who reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from inflight.batch_manager.prefix_table import HASH_BYTES, CachedBlock
from inflight.kv_cache_events import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheEventDiff,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)


class EventBuffer:
    """On the leader only, and only if events are wanted: ranks without one decide the same. Where groups of layers have
    blocks of their own, events are of the first group's."""

    def __init__(self, max_size: int) -> None:
        self._events: deque[KVCacheEvent] = deque(maxlen=max_size)
        self._num_events = 0

    def take(self) -> list[KVCacheEvent]:
        """All since the last call, as far as the ring held them."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def created(self, num_blocks_per_cache_level: list[int]) -> None:
        self._add(KVCacheCreatedData(num_blocks_per_cache_level=num_blocks_per_cache_level))

    def stored(self, blocks: list[CachedBlock], root: bytes, lora_id: int | None) -> None:
        """One event for each run of blocks that follow each other. `root`: the parent of a block that begins a prompt.
        `lora_id`: of the adapter that they were computed with."""
        run: list[CachedBlock] = []
        for block in blocks:
            if run and block.parent_hash != run[-1].block_hash:
                self._stored_run(run, root, lora_id)
                run = []
            run.append(block)
        if run:
            self._stored_run(run, root, lora_id)

    def _stored_run(self, blocks: list[CachedBlock], root: bytes, lora_id: int | None) -> None:
        found = [
            KVCacheStoredBlockData(
                block_hash=_opaque(block.block_hash),
                tokens=block.tokens.tolist(),
                lora_id=lora_id,
                priority=block.priority,
            )
            for block in blocks
        ]
        parent = blocks[0].parent_hash
        self._add(KVCacheStoredData(parent_hash=None if parent == root else _opaque(parent), blocks=found))

    def removed(self, blocks: Iterable[CachedBlock]) -> None:
        hashes = [_opaque(block.block_hash) for block in blocks if _is_of_first_group(block)]
        if hashes:
            self._add(KVCacheRemovedData(block_hashes=hashes))

    def moved(self, block: CachedBlock, old_level: int, new_level: int) -> None:
        self._updated(block, cache_level=KVCacheEventDiff(old_level, new_level))

    def prioritized(self, block: CachedBlock, old_priority: int) -> None:
        self._updated(block, priority=KVCacheEventDiff(old_priority, block.priority))

    def _updated(self, block: CachedBlock, **changes: KVCacheEventDiff) -> None:
        if _is_of_first_group(block):
            self._add(KVCacheUpdatedData(block_hash=_opaque(block.block_hash), **changes))

    def _add(self, data: KVCacheEventData) -> None:
        self._events.append(KVCacheEvent(event_id=self._num_events, data=data))
        self._num_events += 1


def _is_of_first_group(block: CachedBlock) -> bool:
    return len(block.block_hash) == HASH_BYTES


def _opaque(block_hash: bytes) -> int:
    """64 bits of a hash that nobody can compute without the engine's secret."""
    return int.from_bytes(block_hash[:8], "little")
