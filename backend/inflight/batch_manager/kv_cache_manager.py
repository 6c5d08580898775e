"""The KV cache as sequences see it: blocks for their tokens, and reuse of prefixes that were computed before.

Knows tokens and block ids, not the tensors or which sequences may run. Blocks of equal prefixes are shared between
sequences with the same `Request.prefix_identity`, and between the sequences of one request. A shared block is always
full and is never written again: if a prompt ends within a block, each sequence of its request gets a copy of that
block. So does a sequence whose tokens part from those of a cached block within it, where partial reuse is enabled.

Layers with a sliding window may have blocks of their own (BlockGroups). `block_ids` of a sequence, of a prefix and of
what is allocated have then one id for each group, side by side, for each block of tokens; NO_BLOCK stands where a
sequence has passed a block or never needed it. A prefix can be used where the last blocks before its end are cached.

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
from inflight.batch_manager.prefix_finder import BlockHashes, PrefixFinder
from inflight.batch_manager.prefix_table import CachedBlock, PartialMatch, hash_in_group
from inflight.batch_manager.sequence import Sequence
from inflight.batch_manager.sequence_states import SequenceStates
from inflight.batch_manager.state_slots import StateSlots
from inflight.batch_manager.window_shares import WindowShares
from inflight.block_groups import MOST_AHEAD, BlockGroups
from inflight.kv_cache_events import KVCacheEvent
from inflight.kv_cache_retention import Retention
from inflight.scheduler_output import NO_BLOCK, Arrival


class KVCacheManager:
    """Gives blocks of `block_size` tokens to sequences and takes them back."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        hash_key: bytes,
        windows: tuple[int, ...] = (0,),
        max_num_tokens: int = 0,
        enable_reuse: bool = True,
        enable_partial_reuse: bool = False,
        copy_on_partial_reuse: bool = True,
        num_host_blocks: int = 0,
        min_offload_priority: int = 0,
        events: EventBuffer | None = None,
        state_slots: StateSlots | None = None,
        state_interval: int = 0,
    ) -> None:
        """`hash_key`: secret bytes for the table of cached prefixes (see BlockPool). `windows`: see BlockGroups.
        `max_num_tokens`: of a step; matters only with windows. `copy_on_partial_reuse`: also from blocks that sequences
        hold. `num_host_blocks`: slots for cold blocks of at least `min_offload_priority`. `events`: where to note what
        happens to cached blocks; None = nowhere. `state_slots`: for the states of sequences, one taken every
        `state_interval` tokens; None = no layer keeps one."""
        self.block_size = block_size
        self.groups = BlockGroups(block_size, windows)
        self._max_num_tokens = max_num_tokens
        self._enable_reuse = enable_reuse
        # A state is behind whole blocks only, and so is what windows need.
        is_plain = state_slots is None and not self.groups.have_windows
        has_partial_reuse = enable_reuse and enable_partial_reuse and is_plain
        self._pool = BlockPool(
            num_blocks,
            hash_key=hash_key,
            num_host_blocks=num_host_blocks,
            min_offload_priority=min_offload_priority,
            finds_partial_matches=has_partial_reuse,
            events=events,
            on_drop=None if state_slots is None else state_slots.forget,
        )
        self.window_shares = WindowShares(self.groups, self._pool)
        self.states: SequenceStates | None = None
        if state_slots is not None:
            self.states = SequenceStates(
                state_slots,
                block_size=block_size,
                interval=state_interval,
                enable_reuse=enable_reuse,
                may_offload=self._pool.may_offload,
            )
        self._hashes = BlockHashes(self._pool, block_size)
        self._finder = PrefixFinder(
            self.groups,
            self._pool,
            self._hashes,
            self.states,
            enable_reuse=enable_reuse,
            enable_partial_reuse=has_partial_reuse,
            copies_used_blocks=copy_on_partial_reuse,
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
        """Most blocks that a sequence of so many tokens holds at a time."""
        return self.groups.most_held_of_all(num_tokens, self._max_num_tokens)

    def num_blocks_taken(self, num_tokens: int, prefix: Prefix, *, is_reserved: bool = False) -> int:
        """Most free blocks that a sequence of `num_tokens` tokens takes, if it starts on `prefix`.

        A block that a running sequence holds costs nothing; a cached one that no sequence holds counts as free, and so
        does one that is only copied from, until the step is launched. `is_reserved`: with what has to be kept for the
        time when it, or another, passes a block of a window that it shares, see WindowShares.
        """
        groups, (num_shared, num_left) = self.groups, divmod(prefix.num_tokens, self.block_size)
        needed = 0
        for group, window in enumerate(groups.windows):
            needed += groups.most_held(group, num_tokens, self._max_num_tokens)
            if window and is_reserved:
                needed += prefix.source is not None and num_left > 0  # the source's last block, until it is copied
                continue
            held = _held(prefix.block_ids[group :: len(groups)])
            needed += self._pool.num_revived(held) - len(held)
            if prefix.source is not None:
                needed -= num_shared - groups.first_needed(group, num_shared * groups.block_size)
        if prefix.partial is not None and prefix.partial.block_id < self.num_blocks:
            needed += self._pool.num_revived([prefix.partial.block_id])
        return needed

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """The longest prefix of a sequence without blocks that is cached, or that a sibling has computed."""
        return self._finder.find(sequence)

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
            num_shared = self._num_tokens(computed_blocks)
            needed = self.groups.num_blocks(num_shared + num_tokens) * len(self.groups) - len(computed_blocks)
            if needed + self._pool.num_revived(_held(computed_blocks)) > self._pool.num_free:
                return None
            self._start_on(sequence, computed_blocks)
            if self.states is not None:
                self.states.start(sequence, sequence.block_hashes[num_shared // self.block_size - 1])
        missing = self.num_missing(sequence, num_tokens)
        if not missing:
            return []
        if missing > self._pool.num_free:
            return None
        new_block_ids = self._pool.allocate(missing)
        sequence.block_ids.extend(new_block_ids)
        sequence.num_allocated_blocks += missing // len(self.groups)
        self.num_allocated_blocks += missing // len(self.groups)
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
        groups, num_tokens = self.groups, prefix.num_tokens
        self._start_on(sequence, prefix.block_ids)
        num_shared, end = len(sequence.block_ids), groups.num_blocks(num_tokens) * len(groups)
        assert num_shared < end, "a prefix that has arrived is longer than what is cached of it"
        sequence.passed_blocks = [groups.first_needed(group, num_tokens) for group in range(len(groups))]
        sequence.block_ids += [NO_BLOCK] * (end - num_shared)
        places = [
            place
            for place in range(num_shared, end)
            if place // len(groups) >= sequence.passed_blocks[place % len(groups)]
        ]
        for place, block_id in zip(places, self._pool.allocate(len(places)), strict=True):
            sequence.block_ids[place] = block_id
        sequence.num_allocated_blocks += (end - num_shared) // len(groups)
        self.num_allocated_blocks += (end - num_shared) // len(groups)
        if num_tokens % self.block_size:
            self._pool.scrub(sequence.block_ids[-len(groups) :])
        sequence.num_computed_tokens = num_tokens
        arrived = {place: index for index, place in enumerate(groups.handed_over(sequence.num_arrived_tokens))}
        blocks = [(arrived[place], sequence.block_ids[place]) for place in places]
        for sibling in sequence.siblings or (sequence,):
            sibling.num_arrived_tokens = 0
        slots = [] if self.states is None else self.states.arrive(sequence)
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
        held = Counter(block_id for sequence in sequences for block_id in _held(sequence.block_ids))
        held.update(block_id for sequence in sequences for block_id in sequence.tail_blocks)
        return sum(self._pool.is_held_only(id_, times) for id_, times in held.items() if id_ not in kept)

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that `allocate_slots` would take for `num_tokens` more tokens of a sequence that has started."""
        num_blocks = self.groups.num_blocks(sequence.num_computed_tokens + num_tokens) * len(self.groups)
        return max(num_blocks - len(sequence.block_ids), 0)

    def num_yet_taken(self, sequence: Sequence, *, is_decoding: bool) -> int:
        """Most free blocks that a sequence which has started will take until it has its maximum length."""
        groups, num_tokens, held = self.groups, sequence.max_length - 1, len(sequence.block_ids) // len(self.groups)
        if not groups.have_windows:
            return (groups.num_blocks(num_tokens) - held) * len(groups)
        # While it decodes, a token may be pending beside those of a step. It needs no further block: `most_held` counts
        # one for what does not begin with a block.
        at_once = min(MOST_AHEAD, self._max_num_tokens) if is_decoding else self._max_num_tokens
        return sum(
            max(groups.most_held(group, num_tokens, at_once) - held + passed, 0)
            for group, passed in enumerate(sequence.passed_blocks or [0] * len(groups))
        )

    def give_back(self, sequence: Sequence) -> list[int]:
        """Take back the blocks that a sequence has passed, before it gets others: none of its tokens to come sees what
        they hold, those that take the place of rejected drafts included. Returns their places in `block_ids`."""
        if not self.groups.have_windows:
            return []
        num_certain = min(sequence.num_computed_tokens, len(sequence.token_ids) - 1)
        places: list[int] = []
        sequence.passed_blocks = sequence.passed_blocks or [0] * len(self.groups)
        for group, passed in enumerate(sequence.passed_blocks):
            first = self.groups.first_needed(group, num_certain)
            if first > passed:
                places += range(passed * len(self.groups) + group, first * len(self.groups), len(self.groups))
                sequence.passed_blocks[group] = first
        if places:
            self.cache_blocks(sequence)
            block_ids = [sequence.block_ids[place] for place in places]
            for place in places:
                sequence.block_ids[place] = NO_BLOCK
            if not sequence.is_decoding:
                # Nothing was sampled behind them, which would have failed: they may hold NaN.
                self._pool.scrub(block_ids)
            self._pool.free(block_ids)
            self.window_shares.drop(block_ids)
        return places

    def _num_tokens(self, block_ids: list[int]) -> int:
        return len(block_ids) // len(self.groups) * self.block_size

    def fork(self, sequence: Sequence, source: Sequence) -> None:
        """Let a sequence without blocks start, from the next step on, on the prompt that `source` has computed.

        A beam goes on with all that the source has computed, generated tokens included. Full blocks are shared. The one
        in which the last token lies is held as `tail_blocks`, whatever becomes of the source, until the sequence has a
        block of its own and the runner is told to copy it.
        """
        num_shared = sequence.num_prefix_tokens if sequence.beams is None else source.num_computed_tokens
        num_full, num_left = divmod(num_shared, self.block_size)
        border = num_full * len(self.groups)
        self._start_on(sequence, source.block_ids[:border])
        if sequence.beams is not None or len(sequence.block_hashes) < num_full:
            sequence.block_hashes = source.block_hashes[:num_full]
        if num_left:
            sequence.tail_blocks = source.block_ids[border : border + len(self.groups)]
            self.window_shares.add(self.window_shares.of(sequence.tail_blocks))
            self._pool.share(sequence.tail_blocks)
            sequence.num_computed_tokens += num_left
        if self.states is not None:
            self.states.fork(sequence, source)

    def drop_tail(self, sequence: Sequence) -> None:
        """The sequence's `tail_blocks` were copied, or are not needed any more."""
        if sequence.tail_blocks:
            self._pool.free(sequence.tail_blocks)
            self.window_shares.drop(self.window_shares.of(sequence.tail_blocks))
            sequence.tail_blocks = []

    def _start_on(self, sequence: Sequence, computed_blocks: list[int]) -> None:
        self.window_shares.add(self.window_shares.of(computed_blocks))
        shared, num_groups = iter(self._pool.share(_held(computed_blocks))), len(self.groups)
        computed_blocks = [block_id if block_id == NO_BLOCK else next(shared) for block_id in computed_blocks]
        sequence.block_ids.extend(computed_blocks)
        num_blocks = len(computed_blocks) // num_groups
        sequence.passed_blocks = [_num_leading(computed_blocks[group::num_groups]) for group in range(num_groups)]
        if sequence.request.kv_cache_retention_config is not None:
            for place, block_id in enumerate(computed_blocks):
                retention = self._retention(sequence, place // num_groups)
                if retention is not None:
                    self._pool.retain(block_id, retention)
        sequence.num_computed_tokens = num_blocks * self.block_size
        sequence.num_cached_blocks = num_blocks
        sequence.num_reused_blocks += num_blocks
        self.num_reused_blocks += num_blocks

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
            tokens, block_hash = self._hashes.tokens(sequence, index), self._hashes.of_block(sequence, index)
            parent, retention = self._hashes.before(sequence, index), self._retention(sequence, index)
            for group in range(len(self.groups)):
                block_id = sequence.block_ids[index * len(self.groups) + group]
                if block_id == NO_BLOCK:
                    continue
                block = self._pool.cache(block_id, hash_in_group(block_hash, group), tokens, parent, retention)
                if block is not None and not group:
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
            self._pool.forget(_held(sequence.block_ids))
            self._forget_passed(sequence)
        self._pool.free(_held(sequence.block_ids))
        self.window_shares.drop(self.window_shares.of(sequence.block_ids))
        self.drop_tail(sequence)
        if self.states is not None:
            self.states.free(sequence)
        sequence.block_ids, sequence.passed_blocks = [], []
        sequence.num_cached_blocks = 0
        sequence.num_computed_tokens = 0

    def _forget_passed(self, sequence: Sequence) -> None:
        for group, passed in enumerate(sequence.passed_blocks):
            self._pool.forget_cached(hash_in_group(block_hash, group) for block_hash in sequence.block_hashes[:passed])

    def reset(self) -> None:
        """Forget all cached prefixes. No sequence may hold blocks."""
        assert self._pool.num_used == 0, "reset() with blocks in use"
        self._pool.reset()
        if self.states is not None:
            self.states.slots.reset()

    def check(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless used + free = total and `sequences` hold exactly the used blocks."""
        held = [[*_held(sequence.block_ids), *sequence.tail_blocks] for sequence in sequences]
        self._pool.check(held)
        self.window_shares.check(sequences)
        if self.states is not None:
            self.states.check(sequences)

    def _retention(self, sequence: Sequence, index: int) -> Retention | None:
        """What its request says about a block; None = nothing."""
        config = sequence.request.kv_cache_retention_config
        return None if config is None else config.of_block(index * self.block_size, sequence.num_prompt_tokens)


def _held(block_ids: list[int]) -> list[int]:
    return [block_id for block_id in block_ids if block_id != NO_BLOCK]


def _num_leading(block_ids: list[int]) -> int:
    """Of those that are NO_BLOCK."""
    return next((place for place, block_id in enumerate(block_ids) if block_id != NO_BLOCK), len(block_ids))
