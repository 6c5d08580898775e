"""The KV cache as sequences see it: blocks for their tokens, and prefixes that somebody computed before.

Knows tokens and block numbers; not the tensors, nor who may run. Blocks of equal prefixes are shared between sequences
of the same salt; a shared block is always full and never written again.
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
        """Free blocks that disappear when a sequence grows from `computed_blocks` of the cache to `num_tokens` tokens.

        A cached block that a running sequence holds costs nothing; one that only the cache remembers is a free block.
        """
        return self.num_blocks_for(num_tokens) - len(computed_blocks) + self._pool.num_revived(computed_blocks)

    def get_computed_blocks(self, sequence: Sequence) -> list[int]:
        """The longest cached prefix of a sequence without blocks, in blocks.

        At least one token is always left to compute, because its logits are what the next token is sampled from. Of a
        sequence that wants to know more of its prompt all tokens are.
        """
        if not self._enable_reuse or (sequence.gathered is not None and sequence.gathered.needs_prompt):
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
        """Room for `num_tokens` tokens after those computed: the new block ids, or None if memory is short.

        A sequence without blocks starts on `computed_blocks` (what get_computed_blocks found): they become its first
        blocks and its num_computed_tokens. With None returned nothing has changed.
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
        return new_block_ids

    def _start_on(self, sequence: Sequence, computed_blocks: list[int]) -> None:
        self._pool.share(computed_blocks)
        sequence.block_ids.extend(computed_blocks)
        sequence.num_computed_tokens = len(computed_blocks) * self.block_size
        sequence.num_cached_blocks = len(computed_blocks)
        sequence.num_reused_blocks += len(computed_blocks)
        self.num_reused_blocks += len(computed_blocks)

    def count_missed(self, sequence: Sequence) -> None:
        """Note how many full blocks the sequence, about to start, did not find in the cache."""
        if self._enable_reuse:
            num_full = (len(sequence.token_ids) - 1) // self.block_size
            sequence.num_missed_blocks += num_full - sequence.num_cached_blocks

    def cache_blocks(self, sequence: Sequence) -> None:
        """Offer the sequence's full blocks to others, as far as their tokens are known and their steps are launched.

        Steps run in launch order, so whoever is given such a block later also reads it later.
        """
        if not self._enable_reuse:
            return
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self.block_size
        for index in range(sequence.num_cached_blocks, num_full):
            tokens = self._block_tokens(sequence, index)
            self._pool.cache(sequence.block_ids[index], self._block_hash(sequence, index), tokens)
        sequence.num_cached_blocks = max(sequence.num_cached_blocks, num_full)

    def free(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Take all blocks back. `trusted=False`: what they hold must not be given to anybody."""
        if trusted:
            self.cache_blocks(sequence)
        else:
            self._pool.forget(sequence.block_ids)
        self._pool.free(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_cached_blocks = 0
        sequence.num_computed_tokens = 0

    def reset(self) -> None:
        """Forget everything the memory holds. No sequence may hold blocks."""
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
