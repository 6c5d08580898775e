"""What a sequence without blocks may start on: what is cached of its beginning, or what a sibling has computed."""

from __future__ import annotations

from inflight.batch_manager.block_pool import BlockPool
from inflight.batch_manager.prefix import Prefix
from inflight.batch_manager.prefix_search import PrefixSearch
from inflight.batch_manager.prefix_table import PartialMatch, hash_in_group
from inflight.batch_manager.sequence import Sequence, SequenceStatus
from inflight.batch_manager.sequence_states import SequenceStates
from inflight.block_groups import BlockGroups
from inflight.scheduler_output import NO_BLOCK


class BlockHashes:
    """By which the full blocks of sequences are found."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def tokens(self, sequence: Sequence, index: int) -> list[int]:
        return sequence.token_ids[index * self._block_size : (index + 1) * self._block_size]

    def of_block(self, sequence: Sequence, index: int) -> bytes:
        """Hash of a full block; each is computed once, because tokens never change."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            parent = self.before(sequence, len(hashes))
            hashes.append(self._pool.hash_block(parent, self.tokens(sequence, len(hashes))))
        return hashes[index]

    def before(self, sequence: Sequence, index: int) -> bytes:
        """Hash of the block before a block, all of which are full."""
        if index:
            return self.of_block(sequence, index - 1)
        return self._pool.hash_root(sequence.prefix_identity)


class PrefixFinder:
    def __init__(
        self,
        groups: BlockGroups,
        pool: BlockPool,
        hashes: BlockHashes,
        states: SequenceStates | None,
        *,
        enable_reuse: bool,
        enable_partial_reuse: bool,
        copies_used_blocks: bool,
    ) -> None:
        """`copies_used_blocks`: parts also of blocks that sequences hold."""
        self._groups = groups
        self._pool = pool
        self._hashes = hashes
        self._states = states
        self._enable_reuse = enable_reuse
        self._enable_partial_reuse = enable_partial_reuse
        self._copies_used_blocks = copies_used_blocks

    def find(self, sequence: Sequence) -> Prefix:
        """The longest prefix of a sequence without blocks that is cached, or that a sibling has computed.

        It is empty for a sequence that asks for tensors of its prompt: they come from computing it.
        """
        if sequence.gathered is not None and sequence.gathered.needs_prompt:
            return Prefix(0, [])
        source, num_shared = self._find_source(sequence), sequence.num_prefix_tokens
        if source is not None and num_shared == len(sequence.token_ids) - 1:
            return Prefix(num_shared, [], source)  # the longest that there can be: no block needs to be looked up
        block_ids = self._cached_blocks(sequence)
        num_cached = len(block_ids) // len(self._groups) * self._groups.block_size
        most = len(sequence.token_ids) - 1 if self._states is None else sequence.num_prompt_tokens - 1
        num_arrived = min(sequence.num_arrived_tokens, most)
        if num_arrived > max(num_cached, 0 if source is None else num_shared):
            return Prefix(num_arrived, self._without_passed(block_ids, num_arrived), has_arrived=True)
        partial = self._find_partial(sequence, num_cached) if self._enable_partial_reuse else None
        if partial is not None:
            num_cached += partial.num_tokens
        if source is None or num_shared <= num_cached:
            return Prefix(num_cached, block_ids, partial=partial)
        return Prefix(num_shared, [], source)

    def _without_passed(self, block_ids: list[int], num_tokens: int) -> list[int]:
        """NO_BLOCK in the place of those that are not read behind so many tokens."""
        first = [self._groups.first_needed(group, num_tokens) for group in range(len(self._groups))]
        return [
            NO_BLOCK if place // len(first) < first[place % len(first)] else block_id
            for place, block_id in enumerate(block_ids)
        ]

    def _find_partial(self, sequence: Sequence, start: int) -> PartialMatch | None:
        """A cached block that begins with the tokens from `start` on, which begins a block. Beams do without: they
        share whole blocks and part within the last one."""
        wanted = sequence.token_ids[start : min(start + self._groups.block_size, len(sequence.token_ids) - 1)]
        if not wanted or sequence.beams is not None:
            return None
        parent = self._hashes.before(sequence, start // self._groups.block_size)
        return self._pool.find_partial_match(parent, wanted, only_free=not self._copies_used_blocks)

    def _find_source(self, sequence: Sequence) -> Sequence | None:
        """The first running sibling that has computed the prompt."""
        num_shared = sequence.num_prefix_tokens
        for sibling in sequence.siblings:
            is_running = sibling.status is SequenceStatus.RUNNING
            has_computed = is_running and 0 < num_shared <= sibling.num_computed_tokens
            if not has_computed or not self._holds_windows(sibling, num_shared):
                continue
            if self._states is None or self._states.has_prompt(sibling, num_shared):
                return sibling
        return None

    def _holds_windows(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether it has all that is read behind its leading `num_tokens` tokens."""
        first_needed = self._groups.first_needed
        return all(passed <= first_needed(group, num_tokens) for group, passed in enumerate(sequence.passed_blocks))

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The longest cached prefix of a sequence without blocks, in blocks.

        At least one token is always left to compute, because its logits are what the next token is sampled from.
        """
        if not self._enable_reuse:
            return []
        num_left = 1
        if self._states is not None and sequence.export_key:
            num_left = 2  # the state behind all tokens but one is kept while the one before is computed
        search = PrefixSearch(self._groups, lambda index, group: self._look_up(sequence, index, group))
        num_blocks = search.longest((len(sequence.token_ids) - num_left) // self._groups.block_size)
        if self._states is not None:
            while num_blocks and (usable := self._states.num_usable(sequence.block_hashes[:num_blocks])) < num_blocks:
                num_blocks = search.longest(usable)
        return search.block_ids(num_blocks)

    def _look_up(self, sequence: Sequence, index: int, group: int) -> int | None:
        block_hash = self._hashes.of_block(sequence, index)
        return self._pool.lookup(hash_in_group(block_hash, group), self._hashes.tokens(sequence, index))
