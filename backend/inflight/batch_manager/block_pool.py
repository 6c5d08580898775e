"""All blocks of KV memory, by their ids: their reference counts, and which of them hold a prefix for reuse.

Knows no sequence and no tensor. A block is *used* while its reference count is above zero, otherwise *free*. A free
block whose content is still known stays in the table of cached prefixes until its memory is needed. Those are given
away last: by priority, and among equal ones the least recently freed first.

A cached block that is given away moves to host memory if there is a slot for it and its priority is high enough. Such
blocks have the ids from `num_blocks` on; when a sequence starts on one it comes back to the device. All copies that
this takes are collected for the next step (`take_transfers`).

The table is keyed by a hash of (hash of the block before, token ids), starting from a hash of what else a request's
blocks depend on, such as its cache salt. The hash is BLAKE2b with a secret key, so that a client can neither
aim at another's blocks nor fill one bucket; on a hit the token ids themselves are compared, so that even a collision is
only a miss.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import count

from inflight.batch_manager.event_buffer import EventBuffer
from inflight.batch_manager.eviction_queue import EvictionQueue
from inflight.batch_manager.host_tier import NO_TRANSFERS, BlockTransfers, HostTier
from inflight.batch_manager.prefix_table import HASH_BYTES, CachedBlock, PartialMatch, PrefixTable
from inflight.kv_cache_events import DEVICE_LEVEL, HOST_LEVEL
from inflight.kv_cache_retention import DEFAULT_PRIORITY, Retention

SPARE_EXPIRIES = 64
"""Entries of the heap of expiries beyond twice the cached blocks, before stale ones are thrown out."""


class BlockPool:
    """A fixed number of blocks, `0 <= block_id < num_blocks`, and of slots in host memory."""

    def __init__(
        self,
        num_blocks: int,
        *,
        hash_key: bytes,
        num_host_blocks: int = 0,
        min_offload_priority: int = 0,
        finds_partial_matches: bool = False,
        events: EventBuffer | None = None,
        on_drop: Callable[[bytes], None] | None = None,
    ) -> None:
        """`hash_key`: up to 64 secret bytes. It decides nothing but the table's keys, so ranks may differ in it.
        `min_offload_priority`: lower ones do not move to the host. `on_drop`: told the hash of each block that is
        cached nowhere any more."""
        self.num_blocks = num_blocks
        self._hash_key = hash_key
        self._num_host_blocks = num_host_blocks
        self._min_offload_priority = min_offload_priority
        self._finds_partial_matches = finds_partial_matches
        self.events = events
        self._on_drop = on_drop
        self.num_offloaded = 0
        """Blocks that were copied to the host, since the start."""
        self.num_onboarded = 0
        """Blocks that came back, or whose beginning was copied from there, since the start."""
        self._now_ms = 0
        self._table = PrefixTable(finds_partial_matches)
        self._clear()
        if events is not None:
            events.created([num_blocks, num_host_blocks])

    def _clear(self) -> None:
        self._ref_counts = [0] * self.num_blocks
        self._blank = list(range(self.num_blocks - 1, -1, -1))  # a stack; low ids are handed out first
        self._evictable = EvictionQueue()
        self._table = PrefixTable(self._finds_partial_matches)
        self._contents: dict[int, CachedBlock] = {}
        self._host = HostTier(self._num_host_blocks, self.num_blocks)
        self._expiries: list[tuple[int, int, CachedBlock]] = []  # a heap, with stale entries
        self._serial = count(1)
        # Copies within the device, for the next step.
        self._copies: list[tuple[int, int]] = []
        self._copied: list[int] = []  # sources that are held for them
        self._scrubbed: list[int] = []
        self._has_transfers = False

    def reset(self) -> None:
        """Free every block and forget all cached prefixes, because the content of the memory is no longer certain."""
        if self.events is not None:
            self.events.removed(self._table)
        self._clear()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_host_blocks(self) -> int:
        return self._num_host_blocks

    @property
    def num_used_host_blocks(self) -> int:
        return self._host.num_used

    def hash_root(self, identity: bytes) -> bytes:
        """The parent hash of the first block of a request with this `Request.prefix_identity`."""
        return blake2b(identity, digest_size=HASH_BYTES, key=self._hash_key, person=b"salt").digest()

    def hash_block(self, parent: bytes, token_ids: list[int]) -> bytes:
        """Hash of a full block that holds `token_ids` after the prefix whose hash is `parent`."""
        content = parent + array("q", token_ids).tobytes()
        return blake2b(content, digest_size=HASH_BYTES, key=self._hash_key, person=b"block").digest()

    def lookup(self, block_hash: bytes, token_ids: list[int]) -> int | None:
        """The cached block with this hash and exactly these tokens, or None."""
        found = self._table.find(block_hash, token_ids)
        return None if found is None else found.block_id

    def find_partial_match(self, parent: bytes, token_ids: list[int], *, only_free: bool) -> PartialMatch | None:
        """A cached block that begins with some of `token_ids`, after the prefix whose hash is `parent`. `only_free`:
        none that a sequence holds."""
        return self._table.longest_match(parent, token_ids, self._is_free if only_free else _any)

    def _is_free(self, block: CachedBlock) -> bool:
        return self._host.holds(block) or self._ref_counts[block.block_id] == 0

    # -- taking and giving back ----------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, giving up cached prefixes only when no blank block is left.

        The caller has checked `num_free`.
        """
        assert count <= self.num_free, "allocate() needs free blocks"
        block_ids = []
        removed: list[CachedBlock] = []
        for _ in range(count):
            block_id = self._blank.pop() if self._blank else self._evict(removed)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        if removed and self.events is not None:
            self.events.removed(removed)
        return block_ids

    def _evict(self, removed: list[CachedBlock]) -> int:
        """Take the block that is worth least from the device. Adds to `removed` what is cached nowhere any more."""
        block = self._evictable.pop()
        block_id = block.block_id
        del self._contents[block_id]
        if self._host.move_back(block):
            self._contents[block.block_id] = block
        elif not self._offload(block, removed):
            self._drop(block)
            removed.append(block)
            return block_id
        if self.events is not None:
            self.events.moved(block, DEVICE_LEVEL, HOST_LEVEL)
        return block_id

    def _offload(self, block: CachedBlock, removed: list[CachedBlock]) -> bool:
        if not self._num_host_blocks or block.priority < self._min_offload_priority:
            return False
        found = self._host.take_slot(block.priority)
        if found is None:
            return False
        slot, dropped = found
        if dropped is not None:
            del self._contents[dropped.block_id]
            self._drop(dropped)
            removed.append(dropped)
        self._host.place(block, slot)
        self._contents[block.block_id] = block
        self.num_offloaded += 1
        self._has_transfers = True
        return True

    def share(self, block_ids: list[int]) -> list[int]:
        """Add a reference to each of these blocks, which a sequence holds or which are cached. Returns their ids:
        blocks of the host have come to the device, for which the caller has checked `num_free`."""
        waiting: list[CachedBlock] = []
        for block_id in block_ids:
            if block_id >= self.num_blocks:
                block = self._contents.pop(block_id)
                self._host.begin_read(block)
                waiting.append(block)
                continue
            if self._ref_counts[block_id] == 0:
                self._evictable.remove(self._contents[block_id])
                self._contents[block_id].expiry = 0
            self._ref_counts[block_id] += 1
        return self._onboard(block_ids, waiting) if waiting else block_ids

    def _onboard(self, block_ids: list[int], blocks: list[CachedBlock]) -> list[int]:
        """Move these blocks of the host, which are among `block_ids`, to the device. Returns the ids of all."""
        new_ids = {}
        for block, device_id in zip(blocks, self.allocate(len(blocks)), strict=True):
            new_ids[block.block_id] = device_id
            self._host.move_to(block, device_id)
            self._contents[device_id] = block
            block.expiry = 0
            if self.events is not None:
                self.events.moved(block, HOST_LEVEL, DEVICE_LEVEL)
        self.num_onboarded += len(blocks)
        self._has_transfers = True
        return [new_ids.get(block_id, block_id) for block_id in block_ids]

    def is_held_only(self, block_id: int, times: int) -> bool:
        """Whether the block becomes free when it is freed so many times."""
        return self._ref_counts[block_id] == times

    def num_revived(self, block_ids: Iterable[int]) -> int:
        """How many of these cached blocks are free now or on the host, so that sharing them would take as many from the
        free ones."""
        return sum(block_id >= self.num_blocks or self._ref_counts[block_id] == 0 for block_id in block_ids)

    def free(self, block_ids: list[int]) -> None:
        """Drop one reference to each of a sequence's blocks, which are given in the sequence's order.

        The last is freed first: a prefix is worth more than what follows it, because it fits more requests.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} was freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                block = self._contents.get(block_id)
                if block is not None:
                    self._evictable.add(block)
                    if block.duration_ms is not None:
                        self._expect_expiry(block, block.duration_ms)
                else:
                    self._blank.append(block_id)

    def may_offload(self, block_hash: bytes) -> bool:
        """Whether the priority of a block that is cached, here or on the host, is high enough for host memory."""
        block = self._table.get(block_hash)
        return block is not None and block.priority >= self._min_offload_priority

    # -- copies before the next step -----------------------------------------------------------------------------------

    def hold_source(self, block_id: int) -> None:
        """Keep a cached block as it is until the next step is launched: it is to be copied from."""
        if block_id >= self.num_blocks:
            self._host.begin_read(self._contents[block_id])
        else:
            self.share([block_id])
            self._copied.append(block_id)
        self._has_transfers = True

    def copy_beginning(self, source: int, target: int) -> None:
        """Copy a held block into a used one, which nobody shares. Behind the tokens that are the same lie another
        request's, to be overwritten; until then they must be finite, because attention multiplies them by 0."""
        if source >= self.num_blocks:
            self._host.copy_to(source, target)
            self.num_onboarded += 1
        else:
            self._copies.append((source, target))
        self._scrubbed.append(target)

    def scrub(self, block_ids: Iterable[int]) -> None:
        """The same for used blocks that are about to be filled from elsewhere, or given back without being checked."""
        self._scrubbed += block_ids
        self._has_transfers = True

    def take_transfers(self) -> BlockTransfers:
        """All copies since the last call, for the step that is launched now."""
        if not self._has_transfers:
            return NO_TRANSFERS
        offloads, onboards = self._host.take_copies()
        transfers = BlockTransfers(offloads=offloads, onboards=onboards, copies=self._copies, scrubbed=self._scrubbed)
        held, self._copied = self._copied, []
        self._copies, self._scrubbed = [], []
        self._has_transfers = False
        for block_id in held:
            self.free([block_id])
        return transfers

    # -- the table of cached prefixes ----------------------------------------------------------------------------------

    def cache(
        self,
        block_id: int,
        block_hash: bytes,
        token_ids: list[int],
        parent: bytes = b"",
        retention: Retention | None = None,
    ) -> CachedBlock | None:
        """Enter a used, full block into the table of cached prefixes, unless it or its hash is there already. Returns
        it if it was entered. `retention`: of it, or of the one that is there."""
        if block_id in self._contents:
            return None
        known = self._table.find(block_hash, token_ids)
        if known is None:
            if block_hash in self._table:
                return None
            block = CachedBlock(block_id, block_hash, parent, token_ids)
            if retention is not None:
                block.priority, block.duration_ms = retention
            self._table.add(block)
            self._contents[block_id] = block
            return block
        if self._host.holds(known):
            del self._contents[known.block_id]
            self._host.leave(known, block_id)
            self._contents[block_id] = known
            known.expiry = 0
            if self.events is not None:
                self.events.moved(known, HOST_LEVEL, DEVICE_LEVEL)
        if retention is not None:
            self._retain(known, retention)
        return None

    def retain(self, block_id: int, retention: Retention) -> None:
        """Set how long a cached block is kept once it is free. Who says so last decides."""
        block = self._contents.get(block_id)
        if block is not None:
            self._retain(block, retention)

    def _retain(self, block: CachedBlock, retention: Retention) -> None:
        old_priority, block.duration_ms = block.priority, retention.duration_ms
        self._set_priority(block, retention.priority)
        if self._is_free(block):
            block.expiry = 0
            if block.duration_ms is not None:
                self._expect_expiry(block, block.duration_ms)
        if self.events is not None and old_priority != block.priority:
            self.events.prioritized(block, old_priority)

    def _set_priority(self, block: CachedBlock, priority: int) -> None:
        if block.priority == priority:
            return
        queue = self._host.evictable if self._host.holds(block) else self._evictable
        is_queued = block in queue
        if is_queued:
            queue.remove(block)
        block.priority = priority
        if is_queued:
            queue.add(block)

    def _expect_expiry(self, block: CachedBlock, duration_ms: int) -> None:
        block.expiry = next(self._serial)
        heapq.heappush(self._expiries, (self._now_ms + duration_ms, block.expiry, block))
        if len(self._expiries) > SPARE_EXPIRIES + 2 * len(self._table):
            self._expiries = [entry for entry in self._expiries if entry[2].expiry == entry[1]]
            heapq.heapify(self._expiries)

    def note_time(self, now_ms: int) -> None:
        """It is so late: end the priorities whose durations are over. The same on every rank."""
        self._now_ms = now_ms
        while self._expiries and self._expiries[0][0] <= now_ms:
            _, expiry, block = heapq.heappop(self._expiries)
            if block.expiry != expiry:
                continue  # it was used meanwhile, or is forgotten
            block.expiry, block.duration_ms = 0, None
            old_priority = block.priority
            self._set_priority(block, DEFAULT_PRIORITY)
            if self.events is not None and old_priority != DEFAULT_PRIORITY:
                self.events.prioritized(block, old_priority)

    def _drop(self, block: CachedBlock) -> None:
        """Forget a block that is cached nowhere any more."""
        self._table.remove(block)
        block.expiry = 0
        if self._on_drop is not None:
            self._on_drop(block.block_hash)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove used blocks from the table of cached prefixes, because their content may be wrong."""
        removed = [block for block_id in block_ids if (block := self._contents.pop(block_id, None)) is not None]
        for block in removed:
            self._drop(block)
            self._host.forget_device_block(block.block_id)
        if removed and self.events is not None:
            self.events.removed(removed)

    def forget_cached(self, block_hashes: Iterable[bytes]) -> None:
        """The same for whatever is cached under these hashes, whoever holds it."""
        removed = [block for block_hash in block_hashes if (block := self._table.get(block_hash)) is not None]
        for block in removed:
            del self._contents[block.block_id]
            if self._host.holds(block):
                self._host.leave(block, block.block_id)
            elif self._ref_counts[block.block_id] == 0:
                self._evictable.remove(block)
                self._blank.append(block.block_id)
            self._drop(block)
        if removed and self.events is not None:
            self.events.removed(removed)

    # -- tests ---------------------------------------------------------------------------------------------------------

    def check(self, held: Iterable[list[int]]) -> None:
        """Raise AssertionError unless the pool's counts agree with `held`, the block ids of each sequence."""
        expected = [0] * self.num_blocks
        for block_ids in [*held, self._copied]:
            for block_id in block_ids:
                expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from what is held"
        evictable = [block.block_id for block in self._evictable]
        free = [*self._blank, *evictable]
        assert len(free) == len(set(free)), "a block is free twice"
        assert set(free) == {i for i, count in enumerate(expected) if count == 0}, "used and free blocks overlap"
        assert self.num_used + self.num_free == self.num_blocks
        self._host.check()
        self._table.check()
        known = {block.block_id: block for block in self._table}
        assert known == self._contents and len(known) == len(self._table), "the table and the contents differ"
        assert not any(block_id in known for block_id in self._blank), "a blank block is cached"
        assert all(known.get(block_id) is not None for block_id in evictable), "an evictable block is unknown"
        on_host = [block.block_id for block in self._host.blocks()]
        assert sorted(on_host) == sorted(i for i in known if i >= self.num_blocks), "a host block is unknown"


def _any(block: CachedBlock) -> bool:
    return True
