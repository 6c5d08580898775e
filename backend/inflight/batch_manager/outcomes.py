"""What comes of a step: tokens for its sequences, the next beams of searches, the end of what is finished or failed.

Who ends, or is paused, gives back its row and its blocks at once. Knows no order of the queue and no next step.
"""

from __future__ import annotations

from inflight.batch_manager.beam_group import BeamGroup
from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.running_batch import RunningBatch
from inflight.batch_manager.sequence import FINISHED, Sequence, SequenceStatus
from inflight.batch_manager.speculation.draft_count import DraftCount
from inflight.batch_manager.step import NONE, Step
from inflight.batch_manager.waiting_queue import WaitingQueue
from inflight.errors import RequestError
from inflight.result import FinishReason
from inflight.scheduler_output import RowTensors, SchedulerOutput, StepOutput


class Outcomes:
    """Of the steps of one Scheduler, whose state it changes."""

    def __init__(
        self, kv_cache: KVCacheManager, batch: RunningBatch, waiting: WaitingQueue, draft_count: DraftCount
    ) -> None:
        """`draft_count`: where verified drafts are counted."""
        self._kv_cache = kv_cache
        self._batch = batch
        self._waiting = waiting
        self._draft_count = draft_count

    def apply(self, step: Step, scheduled: SchedulerOutput, output: StepOutput, now_ns: int) -> list[Sequence]:
        """Apply the results of a step. Returns the sequences that got tokens, finished or failed, in the order of the
        rows; behind them those that get none and have ended with their prompt."""
        sequences = step.sampling
        assert len(sequences) == len(output.token_ids), "a step must answer every sampling row"
        told = output.errors or output.refused or output.tensors or output.guesses
        rows = scheduled.sampling_rows if told else []
        for row, sequence in step.gathering.items():
            if row in output.tensors and sequence.gathered is not None and not sequence.is_finished:
                sequence.gathered.add_prompt(output.tensors[row])
        progressed: list[Sequence] = []
        some_finished = False
        block_size = self._kv_cache.block_size
        for index, sequence in enumerate(sequences):
            sequence.num_pending -= 1
            if sequence.status is FINISHED:
                continue
            error = output.error(rows[index]) if rows else None
            if error is not None:
                self.fail(sequence, error)
                progressed.append(sequence)
                some_finished = True
                continue
            if sequence.beams is not None:
                ended = self._choose_beams(sequence, sequence.beams, output.tensors[rows[index]], now_ns)
                progressed += ended
                some_finished = some_finished or bool(ended)
                continue
            progressed.append(sequence)
            log_probs = output.log_probs[index] if sequence.wants_log_probs and output.log_probs is not None else None
            num_before = len(sequence.token_ids)
            reason = sequence.append(output.token_ids[index], log_probs, now_ns)
            if index in step.drafts:
                num_accepted = min(len(sequence.token_ids) - num_before, len(output.token_ids[index]) - 1)
                guesses = output.guesses.get(rows[index], NONE) if rows else NONE
                num_new = len(sequence.token_ids) - num_before
                sequence.take_back(step.drafts[index], num_accepted, num_new, len(self._batch), guesses)
                if self._kv_cache.states is not None:
                    self._kv_cache.states.take_back(sequence, step.drafts[index], num_accepted)
                self._draft_count.add(step.drafts[index], num_accepted)
            if sequence.gathered is not None and rows and rows[index] in output.tensors:
                num_tokens = len(sequence.token_ids) - num_before
                sequence.gathered.add_generated(output.tensors[rows[index]], num_tokens)
            if reason:
                self.finish(sequence, reason)
                some_finished = True
            elif len(sequence.token_ids) > (sequence.num_cached_blocks + 1) * block_size:
                self._kv_cache.cache_blocks(sequence)
        for sequence in step.pooled:
            if sequence.status is not FINISHED:
                sequence.first_token_time_ns = sequence.last_token_time_ns = now_ns
                self.finish(sequence, FinishReason.LENGTH)
                progressed.append(sequence)
                some_finished = True
        if some_finished:
            self._batch.drop_finished()
        return progressed

    def _choose_beams(self, beam: Sequence, group: BeamGroup, found: RowTensors, now_ns: int) -> tuple[Sequence, ...]:
        """Take what a step found for one beam, and go on if that was missing. Returns who is answered: at the end, and
        of a stream after each choice."""
        if not group.add(beam, found):
            return ()
        moves = group.choose()
        if group.search.is_done:
            self._end(beam, trusted=True)
            group.conclude(now_ns)
            return group.returned
        if beam.status is SequenceStatus.RUNNING:
            self._batch.move_beams(group, moves)
        else:
            for child, _ in moves:
                child.block_hashes = []
        group.apply(now_ns)
        return group.streamed

    def finish(self, sequence: Sequence, reason: FinishReason, *, trusted: bool = True) -> None:
        """End a sequence, with all beams of its search. `trusted`: its blocks may be reused. If it was running, the
        batch's `drop_finished` follows, also after `fail`."""
        sequence.finish_reason = reason
        self._end(sequence, trusted=trusted)
        if sequence.beams is not None:
            sequence.beams.conclude(reason=reason)

    def fail(self, sequence: Sequence, error: RequestError) -> None:
        """None of its blocks is reused."""
        sequence.error = error
        self._end(sequence, trusted=False)

    def _end(self, sequence: Sequence, *, trusted: bool) -> None:
        for member in sequence.members:
            self.release(member, trusted=trusted)
            member.status = SequenceStatus.FINISHED
            member.siblings = ()

    def release(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Take back its blocks and its row, or its place in the queue."""
        if sequence.status is SequenceStatus.RUNNING:
            if self._batch.release(sequence):
                self._waiting.return_aside()
        elif sequence is sequence.members[0]:
            self._waiting.discard(sequence)
            if sequence.request.loaded_adapter is not None:
                self._waiting.return_aside()  # who waits behind it may find a slot
        self._kv_cache.free(sequence, trusted=trusted)
