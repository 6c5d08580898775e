"""The KV cache as sequences see it: blocks for their tokens, and reuse of prefixes that were computed before.

Knows tokens and block ids, not the tensors or which sequences may run. Blocks of equal prefixes are shared between
sequences with the same cache salt; a shared block is always full and is never written again.
"""

from __future__ import annotations

from inflight.batch_manager.block_pool import BlockPool
from inflight.batch_manager.sequence import Sequence


class KVCacheManager:
    """Gives blocks of `block_size` tokens to sequences and takes them back."""

    def __init__(self, *, num_blocks: int, block_size: int, hash_key: bytes, enable_reuse: bool = True) -> None:
        """`hash_key`: secret bytes for the table of cached prefixes (see BlockPool)."""
        self.block_size = block_size
        self._pool = BlockPool(num_blocks, hash_key=hash_key)
        self._enable_reuse = enable_reuse
        self.num_reused_blocks = 0
        """Blocks that were taken from the cache instead of computed, since the start."""
        self.num_allocated_blocks = 0
        """Empty blocks that sequences were given, since the start."""
        self.num_missed_blocks = 0
        """Full blocks of sequences that started, which were not in the cache, since the start."""

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_used

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_taken(self, num_tokens: int, computed_blocks: list[int]) -> int:
        """Free blocks that a sequence of `num_tokens` tokens takes, if it reuses the cached `computed_blocks`.

        A cached block that a running sequence holds costs nothing; one that no sequence holds counts as free.
        """
        return self.num_blocks_for(num_tokens) - len(computed_blocks) + self._pool.num_revived(computed_blocks)

    def get_computed_blocks(self, sequence: Sequence) -> list[int]:
        """Ids of the cached blocks of the longest prefix of a sequence, which holds no blocks yet.

        At least one token is always left to compute, because its logits are what the next token is sampled from.
        """
        if not self._enable_reuse:
            return []
        block_ids: list[int] = []
        for index in range((len(sequence.token_ids) - 1) // self.block_size):
            block_id = self._pool.lookup(self._block_hash(sequence, index), self._block_tokens(sequence, index))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def allocate_slots(
        self, sequence: Sequence, num_tokens: int, computed_blocks: list[int] | None = None
    ) -> list[int] | None:
        """Allocate blocks for `num_tokens` tokens after those computed. Returns the new block ids, or None, and changes
        nothing, if there are too few free blocks.

        A sequence without blocks may start on `computed_blocks` (from get_computed_blocks): they become its first
        blocks, and its num_computed_tokens covers them.
        """
        if computed_blocks:
            length = len(computed_blocks) * self.block_size + num_tokens
            if self.num_blocks_taken(length, computed_blocks) > self._pool.num_free:
                return None
            self._start_on(sequence, computed_blocks)
        missing = self.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_ids)
        if missing <= 0:
            return []
        if missing > self._pool.num_free:
            return None
        new_block_ids = self._pool.allocate(missing)
        sequence.block_ids.extend(new_block_ids)
        sequence.num_allocated_blocks += missing
        self.num_allocated_blocks += missing
        return new_block_ids

    def _start_on(self, sequence: Sequence, computed_blocks: list[int]) -> None:
        self._pool.share(computed_blocks)
        sequence.block_ids.extend(computed_blocks)
        sequence.num_computed_tokens = len(computed_blocks) * self.block_size
        sequence.num_cached_blocks = len(computed_blocks)
        sequence.num_reused_blocks += len(computed_blocks)
        self.num_reused_blocks += len(computed_blocks)

    def count_missed(self, sequence: Sequence) -> None:
        """Count the full blocks that a sequence which is about to start did not find in the cache."""
        if self._enable_reuse:
            num_full = (len(sequence.token_ids) - 1) // self.block_size
            num_missed = num_full - sequence.num_cached_blocks
            sequence.num_missed_blocks += num_missed
            self.num_missed_blocks += num_missed

    def cache_blocks(self, sequence: Sequence) -> None:
        """Enter the sequence's full blocks into the table of cached prefixes, as far as their tokens are known on the
        host and their steps are launched.

        Steps run in launch order, so a sequence that gets such a block later also reads it after it was written.
        """
        if not self._enable_reuse:
            return
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self.block_size
        for index in range(sequence.num_cached_blocks, num_full):
            tokens = self._block_tokens(sequence, index)
            self._pool.cache(sequence.block_ids[index], self._block_hash(sequence, index), tokens)
        sequence.num_cached_blocks = max(sequence.num_cached_blocks, num_full)

    def free(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Take all blocks back. `trusted=False`: their content may be wrong and must not be reused."""
        if trusted:
            self.cache_blocks(sequence)
        else:
            self._pool.forget(sequence.block_ids)
        self._pool.free(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_cached_blocks = 0
        sequence.num_computed_tokens = 0

    def reset(self) -> None:
        """Forget all cached prefixes. No sequence may hold blocks."""
        assert self._pool.num_used == 0, "reset() with blocks in use"
        self._pool.reset()

    def check(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless used + free = total and `sequences` hold exactly the used blocks."""
        self._pool.check([sequence.block_ids for sequence in sequences])

    def _block_tokens(self, sequence: Sequence, index: int) -> list[int]:
        return sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        """Hash of a full block; each is computed once, because tokens never change."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else self._pool.hash_salt(sequence.request.cache_salt)
            hashes.append(self._pool.hash_block(parent, self._block_tokens(sequence, len(hashes))))
        return hashes[index]
