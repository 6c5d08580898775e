"""Whether the head of the queue may start: the policy's rules, and how many KV blocks a sequence needs.

GUARANTEED_NO_EVICT and STATIC_BATCH reserve the blocks of a sequence at its longest: one that has started always finds
its blocks. MAX_UTILIZATION reserves those of the next step only, and sequences may have to be paused. STATIC_BATCH
lets nobody join before the whole batch has ended. Knows no rows and no steps.
"""

from __future__ import annotations

from inflight.batch_manager.beam_group import BeamGroup
from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.prefix import Prefix
from inflight.batch_manager.sequence import Sequence, SequenceStatus
from inflight.config import SchedulerPolicy


class Admission:
    def __init__(self, kv_cache: KVCacheManager, policy: SchedulerPolicy, enable_chunked_context: bool) -> None:
        self._kv_cache = kv_cache
        self._policy = policy
        self._enable_chunked_context = enable_chunked_context
        self._batch_quota = 0  # sequences that may still join the static batch
        self._refused: tuple[Sequence, int] | None = None  # the queue's head, and the free blocks that were too few

    @property
    def may_pause(self) -> bool:
        """Whether sequences that have started may be paused to free their blocks."""
        return self._policy is SchedulerPolicy.MAX_UTILIZATION

    def is_open(self, num_aside: int) -> bool:
        """Whether another sequence may join the batch. `num_aside`: waiting ones whose places nobody else gets."""
        return self._policy is not SchedulerPolicy.STATIC_BATCH or self._batch_quota > num_aside

    def open_batch(self, num_waiting: int) -> None:
        """No sequence is running: a static batch may be made of those that wait now."""
        self._batch_quota = num_waiting

    def note_start(self) -> None:
        self._batch_quota -= 1

    def refuse(self, sequence: Sequence, room: int) -> None:
        """Remember that the queue's head needs more than `room` blocks. It also completes a static batch."""
        self._refused = (sequence, room)
        self._batch_quota = 0

    def is_refused(self, sequence: Sequence, room: int) -> bool:
        """Whether it was refused with as much room: a long prompt is not looked up again before there is more."""
        return self._refused is not None and self._refused[0] is sequence and room <= self._refused[1]

    def room(self, num_missing: int) -> int:
        """Blocks for those that start. `num_missing`: what running sequences will still take at their longest."""
        return self._kv_cache.num_free_blocks - self.num_reserved(num_missing + self._kv_cache.window_shares.count)

    def num_reserved(self, num_missing: int) -> int:
        """Blocks that are kept for running sequences which may still take so many."""
        return 0 if self.may_pause else num_missing

    def find_prefix(self, sequence: Sequence, room: int) -> Prefix:
        """What it may start on. Copying from a cached block takes that block from the free ones for a step: if it would
        need more than `room` for that reason, it starts on full blocks only, as it could alone."""
        prefix = self._kv_cache.find_prefix(sequence)
        if prefix.partial is not None and self.blocks_to_start(sequence, prefix) > room:
            return prefix.in_full_blocks
        return prefix

    def first_chunk(self, sequence: Sequence, prefix: Prefix, budget: int) -> int:
        """Number of tokens of its first step; 0 if its prompt must not be chunked and does not fit into this step.

        Generated tokens can make a sequence longer than any step, so one that continues may always be chunked.
        """
        remaining = len(sequence.token_ids) - prefix.num_tokens
        if remaining <= budget:
            return remaining
        continues = sequence.status is SequenceStatus.PAUSED or sequence.num_output_tokens > 0
        return budget if self._enable_chunked_context or continues else 0

    def blocks_at_longest(self, sequence: Sequence) -> int:
        return self._kv_cache.num_blocks_for(sequence.max_length - 1)

    def blocks_to_start(self, sequence: Sequence, prefix: Prefix) -> int:
        """Free blocks that it needs to start, with all beams of its search: for its maximum length or, where it may be
        paused, its present length."""
        if sequence.beams is None:
            return self._blocks_of_one(sequence, prefix)
        return self._blocks_of_beams(sequence.beams)

    def _blocks_of_one(self, sequence: Sequence, prefix: Prefix) -> int:
        length = sequence.max_length - 1
        if self.may_pause:
            length = min(length, len(sequence.token_ids) + 1)
        return self._kv_cache.num_blocks_taken(length, prefix, is_reserved=not self.may_pause)

    def _blocks_of_beams(self, group: BeamGroup) -> int:
        """Any beam may part from the others within the prompt's last block, so each counts as if it shared only what is
        cached."""
        live = group.live
        needed = sum(self._blocks_of_one(beam, self._kv_cache.find_prefix(beam)) for beam in live)
        if not self.may_pause:
            needed += self.blocks_at_longest(group.leader) * (len(group.sequences) - len(live))
        return needed
