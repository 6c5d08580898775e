"""Whom the queue's head displaces: running sequences of lower priority, which are paused and lose nothing but time.

The least important go first: the lowest priority, and of these who started last. Nobody is paused in vain: only if the
head then finds the rows and KV blocks that it lacks. A head that lacks a slot for its adapter displaces nobody.
"""

from __future__ import annotations

from inflight.batch_manager.admission import Admission
from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.running_batch import RunningBatch
from inflight.batch_manager.sequence import Sequence


def displaced_by(head: Sequence, batch: RunningBatch, admission: Admission, kv_cache: KVCacheManager) -> int:
    """How many of the last of `batch.sequences` to pause, so that `head` can start; 0 if it can already, or if pausing
    all those of lower priority is not enough."""
    running = batch.sequences
    num_lower = sum(sequence.request.priority < head.request.priority for sequence in running)
    if not num_lower or head.has_pending:
        return 0
    room = admission.room(batch.num_missing_blocks)
    prefix = admission.find_prefix(head, room)
    num_needed = admission.blocks_to_start(head, prefix)
    victims: list[Sequence] = []
    num_rows, reserved = batch.num_free_rows, 0
    for count in range(num_lower + 1):
        if count:
            members = running[-count].members
            num_rows += len(members)
            reserved += sum(map(batch.num_missing, members))
            victims += members
        given_up = admission.num_reserved(reserved + kv_cache.window_shares.num_lost_with(victims, prefix.block_ids))
        num_free = room + given_up + kv_cache.num_freed_with(victims, prefix.block_ids)
        if num_rows >= len(head.members) and num_free >= num_needed:
            return count
    return 0
