"""The KV cache as sequences see it: blocks for their tokens, and reuse of prefixes that were computed before.

Knows tokens and block ids, not the tensors or which sequences may run. Blocks of equal prefixes are shared between
sequences with the same cache salt, and between the sequences of one request. A shared block is always full and is never
written again: if a prompt ends within a block, each sequence of its request gets a copy of that block.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.batch_manager.block_pool import BlockPool
from inflight.batch_manager.sequence import NO_BLOCK, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a sequence without blocks may start on: cached blocks, or the prompt of a running sibling."""

    num_tokens: int
    block_ids: list[int]
    """Cached blocks; empty if there is a source."""
    source: Sequence | None = None
    """The sibling, which holds the tokens once the steps launched so far and the one being scheduled are done."""


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

    def num_blocks_taken(self, num_tokens: int, prefix: Prefix) -> int:
        """Free blocks that a sequence of `num_tokens` tokens takes, if it starts on `prefix`.

        A block that a running sequence holds costs nothing; a cached one that no sequence holds counts as free.
        """
        num_shared = prefix.num_tokens // self.block_size
        return self.num_blocks_for(num_tokens) - num_shared + self._pool.num_revived(prefix.block_ids)

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """The longest prefix of a sequence without blocks that is cached, or that a sibling has computed.

        It is empty for a sequence that asks for tensors of its prompt: they come from computing it.
        """
        if sequence.gathered is not None and sequence.gathered.needs_prompt:
            return Prefix(0, [])
        source, num_shared = self._find_source(sequence), sequence.num_prefix_tokens
        if source is not None and num_shared == len(sequence.token_ids) - 1:
            return Prefix(num_shared, [], source)  # the longest that there can be: no block needs to be looked up
        block_ids = self._cached_blocks(sequence)
        num_cached = len(block_ids) * self.block_size
        if source is None or num_shared <= num_cached:
            return Prefix(num_cached, block_ids)
        return Prefix(num_shared, [], source)

    @staticmethod
    def _find_source(sequence: Sequence) -> Sequence | None:
        """The first running sibling that has computed the prompt."""
        for sibling in sequence.siblings:
            is_running = sibling.status is SequenceStatus.RUNNING
            if is_running and 0 < sequence.num_prefix_tokens <= sibling.num_computed_tokens:
                return sibling
        return None

    def allocate_slots(
        self, sequence: Sequence, num_tokens: int, computed_blocks: list[int] | None = None
    ) -> list[int] | None:
        """Room for `num_tokens` tokens after those computed: the new block ids, or None if memory is short.

        A sequence without blocks starts on `computed_blocks` (a Prefix's): they become its first blocks and its
        num_computed_tokens. With None returned nothing has changed.
        """
        if computed_blocks:
            prefix = Prefix(len(computed_blocks) * self.block_size, computed_blocks)
            if self.num_blocks_taken(prefix.num_tokens + num_tokens, prefix) > self._pool.num_free:
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

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that `allocate_slots` would take for `num_tokens` more tokens of a sequence that has started."""
        return max(self.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_ids), 0)

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The longest cached prefix of a sequence without blocks, in blocks.

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

    def fork(self, sequence: Sequence, source: Sequence) -> None:
        """Let a sequence without blocks start, from the next step on, on the prompt that `source` has computed.

        A beam goes on with all that the source has computed, generated tokens included. Full blocks are shared. The one
        in which the last token lies is held as `tail_block`, whatever becomes
        of the source, until the sequence has a block of its own and the runner is told to copy it.
        """
        num_shared = sequence.num_prefix_tokens if sequence.beams is None else source.num_computed_tokens
        num_full, num_left = divmod(num_shared, self.block_size)
        self._start_on(sequence, source.block_ids[:num_full])
        if sequence.beams is not None or len(sequence.block_hashes) < num_full:
            sequence.block_hashes = source.block_hashes[:num_full]
        if num_left:
            sequence.tail_block = source.block_ids[num_full]
            self._pool.share([sequence.tail_block])
            sequence.num_computed_tokens += num_left

    def drop_tail(self, sequence: Sequence) -> None:
        """The sequence's `tail_block` was copied, or is not needed any more."""
        if sequence.tail_block != NO_BLOCK:
            self._pool.free([sequence.tail_block])
            sequence.tail_block = NO_BLOCK

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
        self.drop_tail(sequence)
        sequence.block_ids = []
        sequence.num_cached_blocks = 0
        sequence.num_computed_tokens = 0

    def reset(self) -> None:
        """Forget all cached prefixes. No sequence may hold blocks."""
        assert self._pool.num_used == 0, "reset() with blocks in use"
        self._pool.reset()

    def check(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless used + free = total and `sequences` hold exactly the used blocks."""
        tails = [[sequence.tail_block] for sequence in sequences if sequence.tail_block != NO_BLOCK]
        self._pool.check([*(sequence.block_ids for sequence in sequences), *tails])

    def _block_tokens(self, sequence: Sequence, index: int) -> list[int]:
        return sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        """Hash of a full block; each is computed once, because tokens never change."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else self._pool.hash_root(sequence.request.prefix_identity)
            hashes.append(self._pool.hash_block(parent, self._block_tokens(sequence, len(hashes))))
        return hashes[index]
