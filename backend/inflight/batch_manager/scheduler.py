"""Decides what one step computes, and updates the sequences with its results.

In-flight batching with chunked prefill: a step holds the next token of every decoding sequence and, in what is left of
`max_num_tokens`, chunks of prompts. Sequences start by (priority, arrival); none starts before the queue's head.

Steps overlap: `schedule` may be called again before `update` was called with the results of the step before. It counts
a launched step as done (`num_computed_tokens`, `num_pending`); the token that such a step samples stays on the device
and feeds the next one. If a sequence turns out to be finished, the results of its later steps are dropped. Its row and
blocks may go to others at once, because the runner runs steps in the order they are launched.

Of the sequences of one request the first to start computes the prompt. The others take rows in the step that contains
the prompt's last chunk, or later, and fork from the first: its full blocks are shared, and the one that holds the
prompt's last token is copied. From the next step on each computes that token, whose logits it needs, and later ones.

The beams of one search start, pause and end together (see BeamGroup). A step brings each of them its likeliest tokens;
when all have theirs, `update` chooses the next beams. One that continues another's text shares its full blocks and
copies the last one, and every beam's token goes to the runner with its next row: it is never scheduled ahead.

A sequence whose adapter finds no slot on the device steps aside until one is free. Those without an adapter overtake
it, those with one do not.

Knows no tensors, no clock, no callbacks: the same calls lead to the same decisions on every rank.
"""

from __future__ import annotations

import heapq
from collections import deque

from inflight.batch_manager.adapter_slots import AdapterSlots
from inflight.batch_manager.admission import Admission
from inflight.batch_manager.beam_group import BeamGroup, Move
from inflight.batch_manager.kv_cache_manager import KVCacheManager, Prefix
from inflight.batch_manager.sequence import NO_BLOCK, Sequence, SequenceStatus
from inflight.batch_manager.step import Step
from inflight.batch_manager.waiting_queue import WaitingQueue
from inflight.config import SchedulerPolicy
from inflight.errors import InvalidRequest, RequestError, StepFailed
from inflight.result import FinishReason
from inflight.scheduler_output import RowTensors, RowWork, SchedulerOutput, StepOutput

NONE: list[int] = []
"""Shared by all rows without new blocks or tokens from the host: nearly every row of every step. Never written to."""


class Scheduler:
    """Chooses the sequences of each step, their numbers of tokens, rows and blocks."""

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int,
        policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT,
        enable_chunked_context: bool = True,
        num_adapter_slots: int = 0,
    ) -> None:
        """`max_batch_size`: rows of a step. `max_num_tokens`: tokens of a step. `max_seq_len`: tokens of a sequence.
        `num_adapter_slots`: adapters that its rows may use."""
        if max_num_tokens < max_batch_size:
            raise ValueError(f"max_num_tokens ({max_num_tokens}) must be at least max_batch_size ({max_batch_size})")
        self.kv_cache = kv_cache
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_num_tokens = max_num_tokens
        self._enable_chunked_context = enable_chunked_context
        self._admission = Admission(kv_cache, policy, enable_chunked_context)
        self._adapters = AdapterSlots(num_adapter_slots)
        self._waiting = WaitingQueue()  # by `order`: paused ones first
        self._running: list[Sequence] = []  # in the order they started; of beams the leader only
        self._free_rows = list(range(max_batch_size))
        self._outstanding: deque[tuple[SchedulerOutput, Step]] = deque()
        self._num_arrived = 0
        self._num_started = 0
        # Updated incrementally, so that a step need not go through all sequences.
        self._num_decoding = 0
        self._num_missing_blocks = 0  # blocks that running sequences still need to reach their maximum length
        self._num_guided = 0

    @property
    def num_running(self) -> int:
        """A beam search counts once, here and in `num_paused`."""
        return len(self._running)

    @property
    def num_paused(self) -> int:
        return self._waiting.num_paused

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue, or a beam search by its leader. Raises InvalidRequest if it could never run,
        even alone."""
        needed = self._admission.blocks_at_longest(sequence) * len(sequence.members)
        if needed > self.kv_cache.num_blocks:
            raise InvalidRequest(
                f"the request needs {needed} KV cache blocks, more than there are ({self.kv_cache.num_blocks}): "
                "ask for fewer tokens"
            )
        if not self._enable_chunked_context and sequence.num_prompt_tokens > self.max_num_tokens:
            raise InvalidRequest(
                f"the prompt has {sequence.num_prompt_tokens} tokens, more than max_num_tokens {self.max_num_tokens} "
                "allows without enable_chunked_context"
            )
        sequence.order = (1, -sequence.request.priority, self._num_arrived)
        self._num_arrived += 1
        self._waiting.push(sequence)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int = 0) -> SchedulerOutput | None:
        """The next step, counted as launched, or None if nothing can run before `update` of an outstanding step."""
        # Decoding sequences come first: one token of the step is reserved for each before prompts get any.
        step = Step(self.max_num_tokens - self._num_decoding)
        self._continue_running(step)
        if self._waiting:
            self._start_waiting(step, now_ns)
        self._share(step)
        if not step.rows:
            if self._waiting and not self._running and not self._outstanding:
                raise RuntimeError("the queue's head does not fit into an empty KV cache")
            return None
        output = SchedulerOutput(
            new_sequences=step.new_sequences,
            rows=step.rows,
            block_copies=step.block_copies,
            adapter_loads=step.adapter_loads,
            samples_late=self._num_guided > 0 and bool(step.sampling),
        )
        self._outstanding.append((output, step))
        return output

    def _share(self, step: Step) -> None:
        """Share what the step computes. Called when the whole step is scheduled: a prefix is shared from the next step
        on, so that no row reads a block that its own step writes, and a block that is copied is not reused in the step.
        """
        for sequence in step.prefilling:
            self.kv_cache.cache_blocks(sequence)
            self.kv_cache.drop_tail(sequence)
        for sequence, source in step.forks:
            self.kv_cache.fork(sequence, source)
            self.kv_cache.count_missed(sequence)
            self._num_missing_blocks += self._num_missing(sequence)

    def _continue_running(self, step: Step) -> None:
        """Add the remaining work of every running sequence, a chunk of a prompt or one token, in order of their start.

        The sequence that is paused to free blocks is the last of the list, so never one that is already in the step.
        """
        running, block_size = self._running, self.kv_cache.block_size
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            if sequence.beams is not None:
                self._continue_beams(sequence.beams, step)
                continue
            length = len(sequence.token_ids) + sequence.num_pending
            if length >= sequence.max_length:
                continue  # an outstanding step samples its last token
            start = sequence.num_computed_tokens
            num_tokens = length - start
            if start < sequence.num_prefill_tokens:
                num_tokens = min(num_tokens, step.budget)
                if num_tokens == 0:
                    continue
            new_block_ids = NONE
            if start + num_tokens > len(sequence.block_ids) * block_size:
                found = self._allocate(sequence, num_tokens, step)
                if found is None:
                    continue
                new_block_ids = found
            self._add_row(sequence, num_tokens, new_block_ids, step)

    def _continue_beams(self, group: BeamGroup, step: Step) -> None:
        """Add what is due of a beam search. If blocks are short it is paused before any of its rows is in the step."""
        budget, num_missing = step.budget, 0
        work: list[tuple[Sequence, int]] = []
        for beam in group.due():
            num_tokens = len(beam.token_ids) - beam.num_computed_tokens
            if not beam.is_decoding:
                num_tokens = min(num_tokens, budget)
                budget -= num_tokens
            if num_tokens:
                work.append((beam, num_tokens))
                num_missing += self.kv_cache.num_missing(beam, num_tokens)
        while num_missing > self.kv_cache.num_free_blocks:
            if self._pause_last(step) is group.leader:
                return
        for beam, num_tokens in work:
            new_block_ids = self.kv_cache.allocate_slots(beam, num_tokens)
            assert new_block_ids is not None, "there was room for it"
            self._num_missing_blocks -= len(new_block_ids)
            self._add_row(beam, num_tokens, new_block_ids, step)

    def _add_row(self, sequence: Sequence, num_tokens: int, new_block_ids: list[int], step: Step) -> None:
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = end = start + num_tokens
        token_ids, samples, is_chosen = NONE, True, False
        if start < sequence.num_prefill_tokens:
            token_ids, samples = sequence.token_ids[start:end], end == sequence.num_prefill_tokens
            if not sequence.is_placed:
                self._place(sequence, start, step)
                new_block_ids = NONE
            step.budget -= num_tokens
            step.prefilling.append(sequence)
            self._num_decoding += samples
        elif sequence.beams is not None:
            token_ids, is_chosen = sequence.token_ids[start:end], True
            if not sequence.is_placed:
                self._place(sequence, start, step)
                new_block_ids = NONE
                step.prefilling.append(sequence)
        if samples:
            sequence.num_pending += 1
            step.sampling.append(sequence)
        if sequence.gathered is not None:
            step.gathering[sequence.row] = sequence
        step.rows.append(
            RowWork(
                row=sequence.row,
                start=start,
                num_tokens=num_tokens,
                token_ids=token_ids,
                new_block_ids=new_block_ids,
                num_sampled=int(samples),
                is_chosen=is_chosen,
            )
        )

    # -- starting, pausing ---------------------------------------------------------------------------------------------

    def _start_waiting(self, step: Step, now_ns: int) -> None:
        """Start the queue's head while there is a row, tokens are left in the step, and there are enough blocks."""
        admission = self._admission
        if not self._running:
            admission.open_batch(len(self._waiting))
        room = admission.room(self._num_missing_blocks)
        while self._waiting.has_head and self._free_rows and step.budget > 0 and admission.is_open:
            sequence = self._waiting.head()
            if not self._has_adapter_slot(sequence):
                self._waiting.set_aside()
                continue
            if len(self._free_rows) < len(sequence.members):
                break
            if sequence.has_pending or admission.is_refused(sequence, room):
                break
            prefix = self.kv_cache.find_prefix(sequence)
            num_tokens = admission.first_chunk(sequence, prefix, step.budget)
            if num_tokens == 0:
                break
            needed = admission.blocks_to_start(sequence, prefix)
            if needed > room:
                admission.refuse(sequence, room)
                break
            self._waiting.pop()
            admission.note_start()
            if sequence.beams is None:
                self._start(sequence, prefix, num_tokens, step, now_ns)
            else:
                self._start_beams(sequence.beams, step, now_ns)
            room -= needed

    def _has_adapter_slot(self, sequence: Sequence) -> bool:
        """Whether its adapter is in a slot or finds one, and no earlier sequence waits for one."""
        if sequence.request.loaded_adapter is None:
            return True
        return not self._waiting.has_aside and self._adapters.has_room(sequence)

    def _num_missing(self, sequence: Sequence) -> int:
        """Free blocks that a running sequence will take until it has its maximum length."""
        return self._admission.blocks_at_longest(sequence) - len(sequence.block_ids)

    def _start(self, sequence: Sequence, prefix: Prefix, num_tokens: int, step: Step, now_ns: int) -> None:
        """Give it a row and its first tokens of the step; who forks from a sibling gets them in the next step."""
        self._take_row(sequence, step, now_ns)
        self._running.append(sequence)
        if prefix.source is not None:
            step.forks.append((sequence, prefix.source))
            return
        new_block_ids = self.kv_cache.allocate_slots(sequence, num_tokens, prefix.block_ids)
        assert new_block_ids is not None, "there was room for it"
        self.kv_cache.count_missed(sequence)
        self._num_missing_blocks += self._num_missing(sequence)
        self._add_row(sequence, num_tokens, NONE, step)

    def _start_beams(self, group: BeamGroup, step: Step, now_ns: int) -> None:
        """Give a row to each of its sequences, and to those that hold a beam the blocks that are cached of it."""
        live = group.live
        for sequence in group.sequences:
            self._take_row(sequence, step, now_ns)
            if sequence in live:
                self.kv_cache.allocate_slots(sequence, 0, self.kv_cache.find_prefix(sequence).block_ids)
                self.kv_cache.count_missed(sequence)
            self._num_missing_blocks += self._num_missing(sequence)
        self._running.append(group.leader)
        group.restart()
        self._continue_beams(group, step)

    def _take_row(self, sequence: Sequence, step: Step, now_ns: int) -> None:
        sequence.row = heapq.heappop(self._free_rows)
        load = self._adapters.take(sequence)
        if load is not None:
            step.adapter_loads.append(load)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_prefill_tokens = len(sequence.token_ids)
        sequence.first_scheduled_time_ns = sequence.first_scheduled_time_ns or now_ns
        sequence.order = (0, 0.0, self._num_started)  # its place in the queue, should it be paused
        self._num_started += 1
        self._num_guided += sequence.is_guided

    def _place(self, sequence: Sequence, start: int, step: Step) -> None:
        """Describe to the runner a sequence whose first row begins at position `start`."""
        sequence.is_placed = True
        if sequence.tail_block != NO_BLOCK:
            step.block_copies.append((sequence.tail_block, sequence.block_ids[start // self.kv_cache.block_size]))
        step.new_sequences.append(sequence.describe())

    def _allocate(self, sequence: Sequence, num_tokens: int, step: Step) -> list[int] | None:
        """New blocks for a running sequence; None if the sequence itself had to be paused.

        If there are too few free blocks, sequences are paused, the last started first. Then fewer blocks are left free
        than the last one paused had held, so it starts again in this step only if others hold part of its blocks.
        """
        while (new_block_ids := self.kv_cache.allocate_slots(sequence, num_tokens)) is None:
            if self._pause_last(step) is sequence:
                return None
        self._num_missing_blocks -= len(new_block_ids)
        return new_block_ids

    def _pause_last(self, step: Step) -> Sequence:
        """Pause the sequence that started last, with all beams of its search, and return it."""
        if not self._admission.may_pause:
            raise RuntimeError("a started sequence found no KV cache block that was reserved for it")
        victim = self._running.pop()
        for member in victim.members:
            step.budget += member.is_decoding  # the token that was kept for it
            self._release(member)
            member.status = SequenceStatus.PAUSED
        self._waiting.push(victim)
        return victim

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def update(self, scheduled: SchedulerOutput, output: StepOutput, now_ns: int = 0) -> list[Sequence]:
        """Apply the results of the oldest outstanding step. Returns the sequences that got tokens, finished or failed,
        in the order of the rows."""
        expected, step = self._outstanding.popleft()
        sequences = step.sampling
        assert scheduled is expected, "steps must be updated in the order they were scheduled"
        assert len(sequences) == len(output.token_ids), "a step must answer every sampling row"
        rows = scheduled.sampling_rows if output.errors or output.refused or output.tensors else []
        for row, sequence in step.gathering.items():
            if row in output.tensors and sequence.gathered is not None and not sequence.is_finished:
                sequence.gathered.add_prompt(output.tensors[row])
        progressed: list[Sequence] = []
        some_finished = False
        block_size = self.kv_cache.block_size
        for index, sequence in enumerate(sequences):
            sequence.num_pending -= 1
            if sequence.status is SequenceStatus.FINISHED:
                continue
            error = _row_error(output, rows[index]) if rows else None
            if error is not None:
                self._fail(sequence, error)
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
            if sequence.gathered is not None and rows and rows[index] in output.tensors:
                num_tokens = len(sequence.token_ids) - num_before
                sequence.gathered.add_generated(output.tensors[rows[index]], num_tokens)
            if reason:
                self._finish(sequence, reason)
                some_finished = True
            elif len(sequence.token_ids) > (sequence.num_cached_blocks + 1) * block_size:
                self.kv_cache.cache_blocks(sequence)
        if some_finished:
            self._drop_finished()
        return progressed

    def _choose_beams(self, beam: Sequence, group: BeamGroup, found: RowTensors, now_ns: int) -> tuple[Sequence, ...]:
        """Take what a step found for one beam, and go on if that was missing. Returns who is answered, at the end."""
        if not group.add(beam, found):
            return ()
        moves = group.choose()
        if group.search.is_done:
            self._end(beam, trusted=True)
            group.conclude(now_ns)
            return group.returned
        if beam.status is SequenceStatus.RUNNING:
            self._move_beams(group, moves)
        else:
            for child, _ in moves:
                child.block_hashes = []
        group.apply(now_ns)
        return ()

    def _move_beams(self, group: BeamGroup, moves: list[Move]) -> None:
        """Let each that moves hold the blocks of the one whose text it takes over; parents stay where they are."""
        live = group.live
        for sequence in group.sequences:
            if sequence not in live or any(sequence is child for child, _ in moves):
                self._num_decoding -= sequence.is_decoding
                self._num_missing_blocks -= self._num_missing(sequence)
                self.kv_cache.free(sequence)
                sequence.num_prefill_tokens = sequence.num_prompt_tokens
                self._num_missing_blocks += self._num_missing(sequence)
                sequence.is_placed = False
            elif sequence.needs_history:
                sequence.is_placed = False
        for child, parent in moves:
            self._num_missing_blocks -= self._num_missing(child)
            self.kv_cache.fork(child, parent)
            child.num_prefill_tokens = child.num_computed_tokens
            self._num_decoding += 1
            self._num_missing_blocks += self._num_missing(child)

    def stop(self, sequence: Sequence, reason: FinishReason, *, trusted: bool = True) -> None:
        """Finish a sequence in any state, with all beams of its search, and free its row and blocks.

        `trusted=False`: a sibling's values were wrong, and so were those of the blocks that they share: none of its
        blocks may be reused.
        """
        if not sequence.is_finished:
            was_running = sequence.status is SequenceStatus.RUNNING
            self._finish(sequence, reason, trusted=trusted)
            if was_running:
                self._drop_finished()

    def abandon(self, error: RequestError) -> list[Sequence]:
        """Drop all outstanding steps, because one failed, and fail the sequences that depend on them.

        Returns these sequences: all running ones, and the paused ones with a token still on the device. The others
        have nothing in the KV cache and stay in the queue. All cached prefixes are forgotten.
        """
        pending = sorted((sequence for sequence in self._waiting if sequence.has_pending), key=lambda s: s.order)
        lost = [*self._running, *pending]
        self._outstanding.clear()
        for sequence in lost:
            self._fail(sequence, error)
        self._drop_finished()
        self.kv_cache.reset()
        self._adapters.reset()  # a step that fills a slot may not have run
        return lost

    def _finish(self, sequence: Sequence, reason: FinishReason, *, trusted: bool = True) -> None:
        sequence.finish_reason = reason
        self._end(sequence, trusted=trusted)
        if sequence.beams is not None:
            sequence.beams.conclude(reason=reason)

    def _fail(self, sequence: Sequence, error: RequestError) -> None:
        sequence.error = error
        self._end(sequence, trusted=False)

    def _end(self, sequence: Sequence, *, trusted: bool) -> None:
        for member in sequence.members:
            self._release(member, trusted=trusted)
            member.status = SequenceStatus.FINISHED
            member.siblings = ()

    def _release(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Take back its blocks and its row, or its place in the queue."""
        if sequence.status is SequenceStatus.RUNNING:
            self._num_decoding -= sequence.is_decoding
            self._num_missing_blocks -= self._num_missing(sequence)
            self._num_guided -= sequence.is_guided
            heapq.heappush(self._free_rows, sequence.row)
            sequence.row = -1
            sequence.is_placed = False
            if self._adapters.release(sequence):
                self._waiting.return_aside()
        elif sequence is sequence.members[0]:
            self._waiting.discard(sequence)
            if sequence.request.loaded_adapter is not None:
                self._waiting.return_aside()  # who waits behind it may find a slot
        self.kv_cache.free(sequence, trusted=trusted)

    def _drop_finished(self) -> None:
        self._running = [sequence for sequence in self._running if not sequence.is_finished]

    def check(self) -> None:
        """Raise AssertionError unless rows, blocks and counts agree with the states of the sequences."""
        running = [member for sequence in self._running for member in sequence.members]
        assert sorted([*self._free_rows, *(s.row for s in running)]) == list(range(self.max_batch_size))
        assert all(sequence.status is SequenceStatus.RUNNING for sequence in running)
        waiting = list(self._waiting)
        assert len(waiting) == len(self._waiting)
        assert self.num_paused == sum(sequence.status is SequenceStatus.PAUSED for sequence in waiting)
        assert not any(member.block_ids or member.row >= 0 for sequence in waiting for member in sequence.members)
        assert self._num_decoding == sum(sequence.is_decoding for sequence in running)
        assert self._num_missing_blocks == sum(map(self._num_missing, running))
        assert self._num_guided == sum(sequence.is_guided for sequence in running)
        self._adapters.check(running)
        self.kv_cache.check(running)


def _row_error(output: StepOutput, row: int) -> RequestError | None:
    if row in output.refused:
        return InvalidRequest(output.refused[row])
    return StepFailed(output.errors[row]) if row in output.errors else None
