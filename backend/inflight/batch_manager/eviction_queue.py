"""Which cached block is given up next: of the lowest priority, and among these the one that has waited longest.

All operations take constant time, whatever the number of blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from inflight.batch_manager.prefix_table import CachedBlock
from inflight.kv_cache_retention import MAX_PRIORITY


class EvictionQueue:
    """A block's priority must not change while it is in the queue."""

    def __init__(self) -> None:
        self._levels: list[OrderedDict[CachedBlock, None]] = [OrderedDict() for _ in range(MAX_PRIORITY + 1)]
        self._occupied = 0  # a bit for each priority that has blocks
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[CachedBlock]:
        for level in self._levels:
            yield from level

    def __contains__(self, block: CachedBlock) -> bool:
        return block in self._levels[block.priority]

    def add(self, block: CachedBlock) -> None:
        """Enter a block as the last of its priority."""
        self._levels[block.priority][block] = None
        self._occupied |= 1 << block.priority
        self._size += 1

    def remove(self, block: CachedBlock) -> None:
        level = self._levels[block.priority]
        del level[block]
        self._size -= 1
        if not level:
            self._occupied &= ~(1 << block.priority)

    @property
    def lowest_priority(self) -> int:
        """Of the block that `pop` would return; there must be one."""
        return (self._occupied & -self._occupied).bit_length() - 1

    def pop(self) -> CachedBlock:
        """Take out the block that is given up next; there must be one."""
        block = next(iter(self._levels[self.lowest_priority]))
        self.remove(block)
        return block
