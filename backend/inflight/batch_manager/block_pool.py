"""All blocks of KV memory, by their ids: their reference counts, and which of them hold a prefix for reuse.

Knows no sequence and no tensor. A block is *used* while its reference count is above zero, otherwise *free*. A free
block whose content is still known stays in the table of cached prefixes until its memory is needed; those are
given away last, least recently freed first.

The table is keyed by a hash of (hash of the block before, token ids), starting from a hash of what else a
request's blocks depend on, such as its cache salt. The hash is BLAKE2b with a secret key, so that a client can neither
aim at another's blocks nor fill one bucket; on a hit the token ids themselves are compared, so that even a collision is
only a miss.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

HASH_BYTES = 16


class BlockPool:
    """A fixed number of blocks, `0 <= block_id < num_blocks`."""

    def __init__(self, num_blocks: int, *, hash_key: bytes) -> None:
        """`hash_key`: up to 64 secret bytes. It decides nothing but the table's keys, so ranks may differ in it."""
        self.num_blocks = num_blocks
        self._hash_key = hash_key
        self.reset()

    def reset(self) -> None:
        """Free every block and forget all cached prefixes, because the content of the memory is no longer certain."""
        self._ref_counts = [0] * self.num_blocks
        self._blank = list(range(self.num_blocks - 1, -1, -1))  # a stack; low ids are handed out first
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._cached: dict[bytes, int] = {}
        self._contents: dict[int, tuple[bytes, array[int]]] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def hash_root(self, identity: bytes) -> bytes:
        """The parent hash of the first block of a request with this `Request.prefix_identity`."""
        return blake2b(identity, digest_size=HASH_BYTES, key=self._hash_key, person=b"salt").digest()

    def hash_block(self, parent: bytes, token_ids: list[int]) -> bytes:
        """Hash of a full block that holds `token_ids` after the prefix whose hash is `parent`."""
        content = parent + array("q", token_ids).tobytes()
        return blake2b(content, digest_size=HASH_BYTES, key=self._hash_key, person=b"block").digest()

    def lookup(self, block_hash: bytes, token_ids: list[int]) -> int | None:
        """The cached block with this hash and exactly these tokens, or None."""
        block_id = self._cached.get(block_hash)
        if block_id is None or self._contents[block_id][1].tolist() != token_ids:
            return None
        return block_id

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, forgetting cached prefixes only when no blank block is left.

        The caller has checked `num_free`.
        """
        assert count <= self.num_free, "allocate() needs free blocks"
        block_ids = []
        for _ in range(count):
            if self._blank:
                block_id = self._blank.pop()
            else:
                block_id, _ = self._evictable.popitem(last=False)
                del self._cached[self._contents.pop(block_id)[0]]
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which a sequence holds or which are cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._evictable[block_id]
            self._ref_counts[block_id] += 1

    def num_revived(self, block_ids: Iterable[int]) -> int:
        """How many of these cached blocks are free now, so that sharing them would take them from the free ones."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def free(self, block_ids: list[int]) -> None:
        """Drop one reference to each of a sequence's blocks, which are given in the sequence's order.

        The last is freed first: a prefix is worth more than what follows it, because it fits more requests.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} was freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if block_id in self._contents:
                    self._evictable[block_id] = None
                else:
                    self._blank.append(block_id)

    def cache(self, block_id: int, block_hash: bytes, token_ids: list[int]) -> None:
        """Enter a used, full block into the table of cached prefixes, unless it or its hash is there already."""
        if block_hash not in self._cached and block_id not in self._contents:
            self._cached[block_hash] = block_id
            self._contents[block_id] = (block_hash, array("q", token_ids))

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove used blocks from the table of cached prefixes, because their content may be wrong."""
        for block_id in block_ids:
            content = self._contents.pop(block_id, None)
            if content is not None:
                del self._cached[content[0]]

    def check(self, held: Iterable[list[int]]) -> None:
        """Raise AssertionError unless the pool's counts agree with `held`, the block ids of each sequence."""
        expected = [0] * self.num_blocks
        for block_ids in held:
            for block_id in block_ids:
                expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from what is held"
        free = [*self._blank, *self._evictable]
        assert len(free) == len(set(free)), "a block is free twice"
        assert set(free) == {i for i, count in enumerate(expected) if count == 0}, "used and free blocks overlap"
        assert self.num_used + self.num_free == self.num_blocks
        assert {i: known[0] for i, known in self._contents.items()} == {i: h for h, i in self._cached.items()}
        assert not any(block_id in self._contents for block_id in self._blank), "a blank block is cached"
        assert all(block_id in self._contents for block_id in self._evictable), "an evictable block is unknown"
