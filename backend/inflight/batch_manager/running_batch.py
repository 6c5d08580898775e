"""Who runs: the sequences that have started, their rows, and the counts that a step would have to sum over them.

The Scheduler decides who starts and ends; here is the account of it. Knows no steps and no queue.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort

from inflight.batch_manager.adapter_slots import AdapterSlots
from inflight.batch_manager.beam_group import BeamGroup, Move
from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.sequence import FINISHED, Sequence, SequenceStatus


class RunningBatch:
    def __init__(
        self, kv_cache: KVCacheManager, max_batch_size: int, num_adapter_slots: int, *, by_priority: bool = False
    ) -> None:
        """`by_priority`: those of lower priority may be paused for others."""
        self._kv_cache = kv_cache
        self.adapters = AdapterSlots(num_adapter_slots)
        self._max_batch_size = max_batch_size
        self._by_priority = by_priority
        self.sequences: list[Sequence] = []
        """By `order`: in the order they started, within each priority if that counts. The last is paused first. Of
        beams the leader only."""
        self.num_decoding = 0
        self.num_missing_blocks = 0
        """Blocks that running sequences still need to reach their maximum length."""
        self.num_guided = 0
        self._free_rows = list(range(max_batch_size))
        self._num_started = 0

    def __len__(self) -> int:
        """A beam search counts once."""
        return len(self.sequences)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def num_missing(self, sequence: Sequence) -> int:
        """Free blocks that a running sequence will take until it has its maximum length."""
        return self._kv_cache.num_yet_taken(sequence, is_decoding=sequence.is_decoding)

    def note_prefilled(self, sequence: Sequence) -> None:
        """With what is scheduled its prefill is complete, so that it needs fewer blocks at a time from now on."""
        self.num_decoding += 1
        self.num_missing_blocks += self.num_missing(sequence)
        self.num_missing_blocks -= self._kv_cache.num_yet_taken(sequence, is_decoding=False)

    def give_back(self, sequence: Sequence) -> list[int]:
        """Take back the blocks that a running sequence has passed, see KVCacheManager."""
        self.num_missing_blocks -= self.num_missing(sequence)
        places = self._kv_cache.give_back(sequence)
        self.num_missing_blocks += self.num_missing(sequence)
        return places

    def allocate(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """Blocks for a running sequence, see KVCacheManager.allocate_slots."""
        self.num_missing_blocks -= self.num_missing(sequence)
        block_ids = self._kv_cache.allocate_slots(sequence, num_tokens)
        self.num_missing_blocks += self.num_missing(sequence)
        return block_ids

    def start(self, sequence: Sequence, now_ns: int) -> list[tuple[int, int]]:
        """Give it, and every beam of its search, a row, and its adapter a slot. Returns what the runner has to put into
        slots first: (slot, uid of an adapter)."""
        loads: list[tuple[int, int]] = []
        for member in sequence.members:
            member.row = heapq.heappop(self._free_rows)
            load = self.adapters.take(member)
            if load is not None:
                loads.append(load)
            member.status = SequenceStatus.RUNNING
            # One more than there are where nothing is sampled: it never decodes.
            member.num_prefill_tokens = len(member.token_ids) + member.is_pooled
            member.first_scheduled_time_ns = member.first_scheduled_time_ns or now_ns
            member.order = (-member.request.priority if self._by_priority else -math.inf, 0, self._num_started)
            self._num_started += 1
            self.num_guided += member.is_guided
        insort(self.sequences, sequence, key=lambda started: started.order)
        return loads

    def count_blocks(self, sequence: Sequence) -> None:
        """A sequence that has a row now has its first blocks, or will have them with its first step."""
        self.num_missing_blocks += self.num_missing(sequence)

    def share(self, prefilling: list[Sequence], forks: list[tuple[Sequence, Sequence]]) -> None:
        """Share what a step computes. Called when the whole step is scheduled: a prefix is shared from the next step
        on, so that no row reads a block that its own step writes, and a block that is copied is not reused in the step.
        """
        for sequence in prefilling:
            self._kv_cache.cache_blocks(sequence)
            self._kv_cache.drop_tail(sequence)
        for sequence, source in forks:
            self._kv_cache.fork(sequence, source)
            self._kv_cache.count_missed(sequence)
            self.count_blocks(sequence)

    def release(self, sequence: Sequence) -> bool:
        """Take back the row of a running sequence, which still has its blocks. `drop_finished` follows if it ended.
        True if the slot of its adapter may go to another one now."""
        self.num_decoding -= sequence.is_decoding
        self.num_missing_blocks -= self.num_missing(sequence)
        self.num_guided -= sequence.is_guided
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = -1
        sequence.is_placed = False
        return self.adapters.release(sequence)

    def drop_finished(self) -> None:
        self.sequences = [sequence for sequence in self.sequences if sequence.status is not FINISHED]

    def move_beams(self, group: BeamGroup, moves: list[Move]) -> None:
        """Let each that moves hold the blocks of the one whose text it takes over; parents stay where they are."""
        live = group.live
        for sequence in group.sequences:
            if sequence not in live or any(sequence is child for child, _ in moves):
                self.num_decoding -= sequence.is_decoding
                self.num_missing_blocks -= self.num_missing(sequence)
                self._kv_cache.free(sequence)
                sequence.num_prefill_tokens = sequence.num_prompt_tokens
                self.num_missing_blocks += self.num_missing(sequence)
                sequence.is_placed = False
            elif sequence.needs_history:
                sequence.is_placed = False
        for child, parent in moves:
            self.num_missing_blocks -= self.num_missing(child)
            self._kv_cache.fork(child, parent)
            child.num_prefill_tokens = child.num_computed_tokens
            self.num_decoding += 1
            self.num_missing_blocks += self.num_missing(child)

    def check(self) -> None:
        """Raise AssertionError unless rows, blocks and counts agree with the states of the sequences."""
        running = [member for sequence in self.sequences for member in sequence.members]
        assert sorted([*self._free_rows, *(s.row for s in running)]) == list(range(self._max_batch_size))
        assert all(sequence.status is SequenceStatus.RUNNING for sequence in running)
        assert self.num_decoding == sum(sequence.is_decoding for sequence in running)
        assert self.num_missing_blocks == sum(map(self.num_missing, running))
        assert self.num_guided == sum(sequence.is_guided for sequence in running)
        assert self.sequences == sorted(self.sequences, key=lambda sequence: sequence.order)
        self.adapters.check(running)
        self._kv_cache.check(running)
