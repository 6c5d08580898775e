"""How often blocks of groups with a window are shared: what a reservation must hold beside the blocks of each sequence.

A sequence that passes a shared block there takes another one, although the shared one does not become free: the others
may pass it much later. Blocks of groups without a window are held to the end, so that sharing them saves them for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from inflight.batch_manager.block_pool import BlockPool
from inflight.batch_manager.sequence import Sequence
from inflight.block_groups import BlockGroups
from inflight.scheduler_output import NO_BLOCK


class WindowShares:
    """Of all sequences that hold blocks, `tail_blocks` included."""

    def __init__(self, groups: BlockGroups, pool: BlockPool) -> None:
        self._groups = groups
        self._pool = pool
        self.count = 0
        """References beyond the first to each block."""

    def of(self, block_ids: list[int]) -> list[int]:
        """Those of groups with a window, of ids of all groups side by side."""
        if not self._groups.have_windows:
            return []
        windows, num_groups = self._groups.windows, len(self._groups)
        return [id_ for place, id_ in enumerate(block_ids) if id_ != NO_BLOCK and windows[place % num_groups]]

    def add(self, block_ids: list[int]) -> None:
        """A sequence is about to share these blocks, `of` all."""
        self.count += self._num_held(block_ids)

    def drop(self, block_ids: list[int]) -> None:
        """A sequence has just freed these blocks, `of` all."""
        self.count -= self._num_held(block_ids)

    def _num_held(self, block_ids: list[int]) -> int:
        """How many of them others hold."""
        return len(block_ids) - self._pool.num_revived(block_ids)

    def num_lost_with(self, sequences: list[Sequence], kept: Collection[int]) -> int:
        """By how much `count` falls when `sequences` give back all. A block of `kept` counts with every reference:
        KVCacheManager.num_freed_with leaves it out, because who starts on it saves it, but here nobody does."""
        held = Counter(self._held(sequences))
        return sum(times - (self._pool.is_held_only(id_, times) and id_ not in kept) for id_, times in held.items())

    def _held(self, sequences: list[Sequence]) -> list[int]:
        lists = [block_ids for sequence in sequences for block_ids in (sequence.block_ids, sequence.tail_blocks)]
        return [block_id for block_ids in lists for block_id in self.of(block_ids)]

    def check(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless `sequences`, which hold all used blocks, share so many."""
        held = self._held(sequences)
        assert self.count == len(held) - len(set(held)), "blocks of windows are shared more or less often"
