"""Groups of layers that have blocks of their own, and which of its blocks a sequence needs in each. Integers only.

Layers with a sliding window see the last tokens only, and a sequence gives back the blocks that it has passed there. A
block is the same number of bytes in every group, so that all take theirs from one pool.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

MOST_AHEAD = 64
"""Tokens of a decoding sequence, drafts included, that launched steps may be ahead of those that the host knows, where
layers have windows: blocks for them are reserved beside those of the window."""


@dataclass(frozen=True, slots=True)
class BlockGroups:
    block_size: int
    """Tokens of a block."""
    windows: tuple[int, ...] = (0,)
    """Of each group: last tokens that its layers see, the token that sees them included; 0 = all."""

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def have_windows(self) -> bool:
        return any(self.windows)

    def of_window(self, window: int) -> list[int]:
        """The groups in which layers with such a window may be: those with the shortest one that holds what they see;
        none if all windows are shorter."""
        enough = {each for each in self.windows if not each or each >= window > 0}
        own = min(enough, key=lambda each: each or math.inf, default=None)
        return [group for group, each in enumerate(self.windows) if each == own]

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of one group that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def first_needed(self, group: int, num_tokens: int) -> int:
        """The first block that is read once the leading `num_tokens` tokens are computed."""
        window = self.windows[group]
        return max(num_tokens - window + 1, 0) // self.block_size if window else 0

    def handed_over(self, num_tokens: int) -> list[int]:
        """Which of a sequence's block ids, those of all groups side by side, are of blocks that are read behind all of
        its leading `num_tokens` tokens or all but the last: what another engine needs of them, in this order."""
        first = [self.first_needed(group, num_tokens - 1) for group in range(len(self))]
        places = range(self.num_blocks(num_tokens) * len(self))
        return [place for place in places if place // len(self) >= first[place % len(self)]]

    def most_held(self, group: int, num_tokens: int, num_at_once: int) -> int:
        """Most blocks that a sequence of `num_tokens` tokens has at a time, if it computes at most `num_at_once` of
        them before it gives back what it has passed."""
        num_blocks, window = self.num_blocks(num_tokens), self.windows[group]
        return min(num_blocks, self.num_blocks(window - 1 + num_at_once) + 1) if window else num_blocks

    def most_held_of_all(self, num_tokens: int, num_at_once: int) -> int:
        """The same in all groups together."""
        return sum(self.most_held(group, num_tokens, num_at_once) for group in range(len(self)))

    def most_tokens(self, num_blocks: int, num_at_once: int, limit: int) -> int:
        """Tokens of the longest sequence, of at most `limit`, for which so many blocks suffice."""
        lengths = range(1, limit + 1)
        return bisect_right(lengths, num_blocks, key=lambda length: self.most_held_of_all(length, num_at_once))
