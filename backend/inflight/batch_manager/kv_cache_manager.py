"""The KV cache as sequences see it: blocks for their tokens, and reuse of prefixes that were computed before.

Knows tokens and block ids, not the tensors or which sequences may run. Blocks of equal prefixes are shared between
sequences with the same `Request.prefix_identity`, and between the sequences of one request. A shared block is always
full and is never written again: if a prompt ends within a block, each sequence of its request gets a copy of that
block. So does a sequence whose tokens part from those of a cached block within it, where partial reuse is enabled.

Recurrent layers keep a state for each sequence. Where there are some, `states` says behind which of its tokens it is
kept, and a prefix can be used only as far as there is a state behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from inflight.batch_manager.block_pool import BlockPool
from inflight.batch_manager.event_buffer import EventBuffer
from inflight.batch_manager.host_tier import BlockTransfers
from inflight.batch_manager.prefix import Prefix
from inflight.batch_manager.prefix_table import CachedBlock, PartialMatch
from inflight.batch_manager.sequence import NO_BLOCK, Sequence, SequenceStatus
from inflight.batch_manager.sequence_states import SequenceStates
from inflight.batch_manager.state_slots import StateSlots
from inflight.kv_cache_events import KVCacheEvent
from inflight.kv_cache_retention import Retention
from inflight.scheduler_output import Arrival


class KVCacheManager:
    """Gives blocks of `block_size` tokens to sequences and takes them back."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        hash_key: bytes,
        enable_reuse: bool = True,
        enable_partial_reuse: bool = False,
        copy_on_partial_reuse: bool = True,
        num_host_blocks: int = 0,
        min_offload_priority: int = 0,
        events: EventBuffer | None = None,
        state_slots: StateSlots | None = None,
        state_interval: int = 0,
    ) -> None:
        """`hash_key`: secret bytes for the table of cached prefixes (see BlockPool). `copy_on_partial_reuse`: also from
        blocks that sequences hold. `num_host_blocks`: slots for cold blocks of at least `min_offload_priority`.
        `events`: where to note what happens to cached blocks; None = nowhere. `state_slots`: for the states of
        sequences, one taken every `state_interval` tokens; None = no layer keeps one."""
        self.block_size = block_size
        self._enable_reuse = enable_reuse
        # A state is behind whole blocks only.
        self._enable_partial_reuse = enable_reuse and enable_partial_reuse and state_slots is None
        self._copies_used_blocks = copy_on_partial_reuse
        self._pool = BlockPool(
            num_blocks,
            hash_key=hash_key,
            num_host_blocks=num_host_blocks,
            min_offload_priority=min_offload_priority,
            finds_partial_matches=self._enable_partial_reuse,
            events=events,
            on_drop=None if state_slots is None else state_slots.forget,
        )
        self.states: SequenceStates | None = None
        if state_slots is not None:
            self.states = SequenceStates(
                state_slots,
                block_size=block_size,
                interval=state_interval,
                enable_reuse=enable_reuse,
                may_offload=self._pool.may_offload,
            )
        self.num_reused_blocks = 0
        """Blocks that were taken from the cache instead of computed, since the start."""
        self.num_allocated_blocks = 0
        """Empty blocks that sequences were given, since the start."""
        self.num_missed_blocks = 0
        """Full blocks of sequences that started, which were not in the cache, since the start."""
        self.num_partially_reused_blocks = 0
        """Blocks whose beginning was copied from a cached one, since the start. They count as allocated."""

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_used

    @property
    def num_host_blocks(self) -> int:
        return self._pool.num_host_blocks

    @property
    def num_used_host_blocks(self) -> int:
        return self._pool.num_used_host_blocks

    @property
    def num_offloaded_blocks(self) -> int:
        """Blocks that were copied to host memory, since the start."""
        return self._pool.num_offloaded

    @property
    def num_onboarded_blocks(self) -> int:
        """Blocks that were copied back to the device, since the start."""
        return self._pool.num_onboarded

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_taken(self, num_tokens: int, prefix: Prefix) -> int:
        """Free blocks that a sequence of `num_tokens` tokens takes, if it starts on `prefix`.

        A block that a running sequence holds costs nothing; a cached one that no sequence holds counts as free, and so
        does one that is only copied from, until the step is launched.
        """
        num_shared = len(prefix.block_ids) if prefix.has_arrived else prefix.num_tokens // self.block_size
        needed = self.num_blocks_for(num_tokens) - num_shared + self._pool.num_revived(prefix.block_ids)
        if prefix.partial is not None and prefix.partial.block_id < self.num_blocks:
            needed += self._pool.num_revived([prefix.partial.block_id])
        return needed

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
        most = len(sequence.token_ids) - 1 if self.states is None else sequence.num_prompt_tokens - 1
        num_arrived = min(sequence.num_arrived_tokens, most)
        if num_arrived > max(num_cached, 0 if source is None else num_shared):
            return Prefix(num_arrived, block_ids, has_arrived=True)
        partial = self._find_partial(sequence, num_cached) if self._enable_partial_reuse else None
        if partial is not None:
            num_cached += partial.num_tokens
        if source is None or num_shared <= num_cached:
            return Prefix(num_cached, block_ids, partial=partial)
        return Prefix(num_shared, [], source)

    def _find_partial(self, sequence: Sequence, start: int) -> PartialMatch | None:
        """A cached block that begins with the tokens from `start` on, which begins a block. Beams do without: they
        share whole blocks and part within the last one."""
        wanted = sequence.token_ids[start : min(start + self.block_size, len(sequence.token_ids) - 1)]
        if not wanted or sequence.beams is not None:
            return None
        parent = self._parent_hash(sequence, start // self.block_size)
        return self._pool.find_partial_match(parent, wanted, only_free=not self._copies_used_blocks)

    def _find_source(self, sequence: Sequence) -> Sequence | None:
        """The first running sibling that has computed the prompt."""
        num_shared = sequence.num_prefix_tokens
        for sibling in sequence.siblings:
            is_running = sibling.status is SequenceStatus.RUNNING
            has_computed = is_running and 0 < num_shared <= sibling.num_computed_tokens
            if has_computed and (self.states is None or self.states.has_prompt(sibling, num_shared)):
                return sibling
        return None

    def allocate_slots(
        self,
        sequence: Sequence,
        num_tokens: int,
        computed_blocks: list[int] | None = None,
        partial: PartialMatch | None = None,
    ) -> list[int] | None:
        """Room for `num_tokens` tokens after those computed: the new block ids, or None if memory is short.

        A sequence without blocks starts on `computed_blocks` and `partial` (a Prefix's): the blocks become its first
        ones, and all their tokens its num_computed_tokens. With None returned nothing has changed.
        """
        if partial is not None:
            return self._start_within_block(sequence, num_tokens, computed_blocks or [], partial)
        if computed_blocks:
            prefix = Prefix(len(computed_blocks) * self.block_size, computed_blocks)
            if self.num_blocks_taken(prefix.num_tokens + num_tokens, prefix) > self._pool.num_free:
                return None
            self._start_on(sequence, computed_blocks)
            if self.states is not None:
                self.states.start(sequence, sequence.block_hashes[len(computed_blocks) - 1])
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

    def _start_within_block(
        self, sequence: Sequence, num_tokens: int, computed_blocks: list[int], partial: PartialMatch
    ) -> list[int] | None:
        """The same for a sequence whose first own block begins with a copy of a cached one."""
        num_shared = len(computed_blocks) * self.block_size + partial.num_tokens
        prefix = Prefix(num_shared, computed_blocks, partial=partial)
        if self.num_blocks_taken(num_shared + num_tokens, prefix) > self._pool.num_free:
            return None
        self._pool.hold_source(partial.block_id)
        self._start_on(sequence, computed_blocks)
        new_block_ids = self.allocate_slots(sequence, partial.num_tokens + num_tokens)
        assert new_block_ids, "there was room for it"
        self._pool.copy_beginning(partial.block_id, new_block_ids[0])
        sequence.num_computed_tokens = num_shared
        self.num_partially_reused_blocks += 1
        return new_block_ids

    def start_on_arrived(self, sequence: Sequence, prefix: Prefix) -> Arrival:
        """Let a sequence with a row and without blocks start on a prefix that has arrived, for which the caller has
        checked that there is room. Returns what of it is to be copied to where on the device."""
        self._start_on(sequence, prefix.block_ids)
        num_shared = len(sequence.block_ids)
        new_block_ids = self.allocate_slots(sequence, prefix.num_tokens - sequence.num_computed_tokens)
        assert new_block_ids, "a prefix that has arrived is longer than what is cached of it"
        if prefix.num_tokens % self.block_size:
            self._pool.scrub(new_block_ids[-1])
        sequence.num_computed_tokens = prefix.num_tokens
        for sibling in sequence.siblings or (sequence,):
            sibling.num_arrived_tokens = 0
        slots = [] if self.states is None else self.states.arrive(sequence)
        blocks = list(enumerate(new_block_ids, num_shared))
        return Arrival(request_id=sequence.request.request_id, blocks=blocks, slots=slots)

    def take_transfers(self) -> BlockTransfers:
        """The copies of blocks that the step which is launched now has to begin with."""
        return self._pool.take_transfers()

    def note_time(self, now_ms: int) -> None:
        """It is so late, on a clock that all ranks share: durations of retention count on it."""
        self._pool.note_time(now_ms)

    def take_events(self) -> list[KVCacheEvent]:
        """What happened to cached blocks since the last call; always empty on ranks that note no events."""
        return [] if self._pool.events is None else self._pool.events.take()

    @property
    def has_event_buffer(self) -> bool:
        return self._pool.events is not None

    def num_freed_with(self, sequences: list[Sequence], kept: Collection[int]) -> int:
        """Blocks, but for those of `kept`, that only `sequences` hold."""
        held = Counter(block_id for sequence in sequences for block_id in sequence.block_ids)
        held.update(sequence.tail_block for sequence in sequences if sequence.tail_block != NO_BLOCK)
        return sum(self._pool.is_held_only(id_, times) for id_, times in held.items() if id_ not in kept)

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
        num_left = 1
        if self.states is not None and sequence.export_key:
            num_left = 2  # the state behind all tokens but one is kept while the one before is computed
        for index in range((len(sequence.token_ids) - num_left) // self.block_size):
            block_id = self._pool.lookup(self._block_hash(sequence, index), self._block_tokens(sequence, index))
            if block_id is None:
                break
            block_ids.append(block_id)
        if self.states is not None:
            del block_ids[self.states.num_usable(sequence.block_hashes[: len(block_ids)]) :]
        return block_ids

    def fork(self, sequence: Sequence, source: Sequence) -> None:
        """Let a sequence without blocks start, from the next step on, on the prompt that `source` has computed.

        A beam goes on with all that the source has computed, generated tokens included. Full blocks are shared. The one
        in which the last token lies is held as `tail_block`, whatever becomes of the source, until the sequence has a
        block of its own and the runner is told to copy it.
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
        if self.states is not None:
            self.states.fork(sequence, source)

    def drop_tail(self, sequence: Sequence) -> None:
        """The sequence's `tail_block` was copied, or is not needed any more."""
        if sequence.tail_block != NO_BLOCK:
            self._pool.free([sequence.tail_block])
            sequence.tail_block = NO_BLOCK

    def _start_on(self, sequence: Sequence, computed_blocks: list[int]) -> None:
        computed_blocks = self._pool.share(computed_blocks)
        sequence.block_ids.extend(computed_blocks)
        if sequence.request.kv_cache_retention_config is not None:
            for index, block_id in enumerate(computed_blocks):
                retention = self._retention(sequence, index)
                if retention is not None:
                    self._pool.retain(block_id, retention)
        sequence.num_computed_tokens = len(computed_blocks) * self.block_size
        sequence.num_cached_blocks = len(computed_blocks)
        sequence.num_reused_blocks += len(computed_blocks)
        self.num_reused_blocks += len(computed_blocks)

    def count_missed(self, sequence: Sequence) -> None:
        """Count the full blocks that a sequence which is about to start did not find in the cache, and note what it
        found."""
        if sequence.num_cached_at_start is None:
            sequence.num_cached_at_start = sequence.num_computed_tokens
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
        if num_full > sequence.num_cached_blocks:
            self._cache_blocks(sequence, num_full)
        if self.states is not None:
            self.states.enter(sequence, num_full * self.block_size)

    def _cache_blocks(self, sequence: Sequence, num_full: int) -> None:
        entered: list[CachedBlock] = []
        for index in range(sequence.num_cached_blocks, num_full):
            tokens, block_hash = self._block_tokens(sequence, index), self._block_hash(sequence, index)
            parent, retention = self._parent_hash(sequence, index), self._retention(sequence, index)
            block = self._pool.cache(sequence.block_ids[index], block_hash, tokens, parent, retention)
            if block is not None:
                entered.append(block)
        sequence.num_cached_blocks = num_full
        if self._pool.events is not None:
            adapter = sequence.request.loaded_adapter
            root = self._pool.hash_root(sequence.prefix_identity)
            self._pool.events.stored(entered, root, None if adapter is None else adapter.uid)

    def free(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Take all blocks back. `trusted=False`: their content may be wrong and must not be reused."""
        if trusted:
            self.cache_blocks(sequence)
        else:
            self._pool.forget(sequence.block_ids)
        self._pool.free(sequence.block_ids)
        self.drop_tail(sequence)
        if self.states is not None:
            self.states.free(sequence)
        sequence.block_ids = []
        sequence.num_cached_blocks = 0
        sequence.num_computed_tokens = 0

    def reset(self) -> None:
        """Forget all cached prefixes. No sequence may hold blocks."""
        assert self._pool.num_used == 0, "reset() with blocks in use"
        self._pool.reset()
        if self.states is not None:
            self.states.slots.reset()

    def check(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless used + free = total and `sequences` hold exactly the used blocks."""
        tails = [[sequence.tail_block] for sequence in sequences if sequence.tail_block != NO_BLOCK]
        self._pool.check([*(sequence.block_ids for sequence in sequences), *tails])
        if self.states is not None:
            self.states.check(sequences)

    def _block_tokens(self, sequence: Sequence, index: int) -> list[int]:
        return sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        """Hash of a full block; each is computed once, because tokens never change."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            parent = self._parent_hash(sequence, len(hashes))
            hashes.append(self._pool.hash_block(parent, self._block_tokens(sequence, len(hashes))))
        return hashes[index]

    def _parent_hash(self, sequence: Sequence, index: int) -> bytes:
        """Hash of the block before a block, all of which are full."""
        if index:
            return self._block_hash(sequence, index - 1)
        return self._pool.hash_root(sequence.prefix_identity)

    def _retention(self, sequence: Sequence, index: int) -> Retention | None:
        """What its request says about a block; None = nothing."""
        config = sequence.request.kv_cache_retention_config
        return None if config is None else config.of_block(index * self.block_size, sequence.num_prompt_tokens)
