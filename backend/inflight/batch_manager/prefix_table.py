"""The table of cached prefixes: which blocks are known, by their hash, and what follows which.

Knows no reference counts and no memory. With `keeps_children` the continuations of each block are kept in the order of
their tokens: the one that shares the longest beginning with some other tokens is then next to where these would stand.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

from inflight.kv_cache_retention import DEFAULT_PRIORITY

HASH_BYTES = 16
"""Of a block's tokens and of what is before them."""


def hash_in_group(block_hash: bytes, group: int) -> bytes:
    """What a block of a group of layers is found by, if this is the hash of its tokens."""
    return block_hash + bytes((group,)) if group else block_hash


class CachedBlock:
    """A full block whose content is known."""

    __slots__ = ("block_hash", "block_id", "duration_ms", "expiry", "parent_hash", "priority", "tokens")

    def __init__(self, block_id: int, block_hash: bytes, parent_hash: bytes, token_ids: list[int]) -> None:
        self.block_id = block_id
        self.block_hash = block_hash
        self.parent_hash = parent_hash
        self.tokens = array("q", token_ids)
        self.priority = DEFAULT_PRIORITY
        self.duration_ms: int | None = None
        self.expiry = 0
        """Number of the pool's entry that says when its priority ends; 0 = it is in use, or its priority does not."""


class PartialMatch(NamedTuple):
    block_id: int
    num_tokens: int
    """How many of its first tokens are the ones looked for; at least 1 and not all."""


class PrefixTable:
    def __init__(self, keeps_children: bool) -> None:
        self._keeps_children = keeps_children
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._children: dict[bytes, list[CachedBlock]] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._by_hash.values())

    def find(self, block_hash: bytes, token_ids: list[int]) -> CachedBlock | None:
        """The block with this hash and exactly these tokens. Tokens are compared: a collision is only a miss."""
        found = self._by_hash.get(block_hash)
        return found if found is not None and found.tokens.tolist() == token_ids else None

    def get(self, block_hash: bytes) -> CachedBlock | None:
        return self._by_hash.get(block_hash)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def add(self, block: CachedBlock) -> None:
        self._by_hash[block.block_hash] = block
        if self._keeps_children:
            siblings = self._children.setdefault(block.parent_hash, [])
            siblings.insert(bisect_left(siblings, block.tokens, key=_tokens), block)

    def remove(self, block: CachedBlock) -> None:
        del self._by_hash[block.block_hash]
        if self._keeps_children:
            siblings = self._children[block.parent_hash]
            index = bisect_left(siblings, block.tokens, key=_tokens)
            while siblings[index] is not block:  # equal tokens: two parents with one hash
                index += 1
            del siblings[index]
            if not siblings:
                del self._children[block.parent_hash]

    def longest_match(
        self, parent_hash: bytes, token_ids: list[int], may_use: Callable[[CachedBlock], bool]
    ) -> PartialMatch | None:
        """The block behind this parent that begins with most of `token_ids`, of the two nearest to them that
        `may_use` accepts; of equal ones the smaller tokens. None if not even the first token is the same."""
        siblings = self._children.get(parent_hash)
        if not siblings:
            return None
        wanted = array("q", token_ids)
        place = bisect_left(siblings, wanted, key=_tokens)
        best = None
        for block in siblings[max(place - 1, 0) : place + 1]:
            num_equal = _num_equal(block.tokens, wanted)
            if num_equal > (best.num_tokens if best else 0) and may_use(block):
                best = PartialMatch(block.block_id, num_equal)
        return best

    def check(self) -> None:
        """Raise AssertionError unless children are kept of exactly the blocks in the table, in order."""
        children = [block for siblings in self._children.values() for block in siblings]
        assert not self._keeps_children or set(children) == set(self), "children and blocks differ"
        for parent_hash, siblings in self._children.items():
            assert all(block.parent_hash == parent_hash for block in siblings)
            assert [block.tokens for block in siblings] == sorted(block.tokens for block in siblings)


def _tokens(block: CachedBlock) -> array[int]:
    return block.tokens


def _num_equal(first: array[int], second: array[int]) -> int:
    """Length of the beginning that both have."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
