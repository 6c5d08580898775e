"""Decides what one step computes, and what its outcome means for each sequence.

In-flight batching with chunked prefill: a step holds the next token of every decoding sequence and, in what is left of
`max_num_tokens`, pieces of prompts. Sequences start by (priority, arrival); the head of the queue is never overtaken.

Steps overlap: `schedule` may be called again before `update` has brought the step before to the host. It counts a
launched step as done (`num_computed_tokens`, `num_pending`); the token that such a step samples stays on the device and
feeds the next one. A sequence that turns out to be finished has the rows of its later steps dropped. Its row and
blocks may go to others at once, because the runner runs steps in the order they are launched.

Knows no tensors, no clock, no callbacks: equal calls make equal decisions on every rank.
"""

from __future__ import annotations

import heapq
from collections import deque

from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.sequence import Sequence, SequenceStatus
from inflight.batch_manager.waiting_queue import WaitingQueue
from inflight.config import SchedulerPolicy
from inflight.errors import InvalidRequest, RequestError, StepFailed
from inflight.result import FinishReason
from inflight.scheduler_output import NO_SLOT, NewSequence, RowWork, SchedulerOutput, StepOutput

NONE: list[int] = []
"""Shared by all rows without new blocks or tokens from the host: nearly every row of every step. Never written to."""


class _Step:
    """A step while it is being put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens left for prompts."""
        self.new_sequences: list[NewSequence] = []
        self.rows: list[RowWork] = []
        self.sampling: list[Sequence] = []
        """Who gets a token: the order of SchedulerOutput.sampling_rows."""
        self.prefilling: list[Sequence] = []
        self.gathering: dict[int, Sequence] = {}
        """By row, those that ask for tensors."""


class Scheduler:
    """Who runs, with how many tokens, on which row and which blocks."""

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int,
        policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT,
        enable_chunked_context: bool = True,
    ) -> None:
        """`max_batch_size`: rows of a step. `max_num_tokens`: tokens of a step. `max_seq_len`: tokens of a sequence."""
        if max_num_tokens < max_batch_size:
            raise ValueError(f"max_num_tokens ({max_num_tokens}) must be at least max_batch_size ({max_batch_size})")
        self.kv_cache = kv_cache
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self._max_num_tokens = max_num_tokens
        self._policy = policy
        self._enable_chunked_context = enable_chunked_context
        self._waiting = WaitingQueue()  # by `order`: paused ones first
        self._running: list[Sequence] = []  # in the order they started
        self._free_rows = list(range(max_batch_size))
        self._outstanding: deque[tuple[SchedulerOutput, _Step]] = deque()
        self._num_arrived = 0
        self._num_started = 0
        self._batch_quota = 0  # sequences that may still join the static batch
        self._refused: tuple[Sequence, int] | None = None  # the queue's head, and the room that was too little for it
        # Counted as they change: a step does not look at every sequence for them.
        self._num_decoding = 0
        self._num_missing_blocks = 0  # that the running sequences do not hold yet and need at their longest
        self._num_masked = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_paused(self) -> int:
        return self._waiting.num_paused

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue. Raises InvalidRequest if it could never run, even alone."""
        needed = self._num_blocks_at_longest(sequence)
        if needed > self.kv_cache.num_blocks:
            raise InvalidRequest(
                f"the request needs {needed} KV cache blocks, more than there are ({self.kv_cache.num_blocks}): "
                "ask for fewer tokens"
            )
        if not self._enable_chunked_context and sequence.num_prompt_tokens > self._max_num_tokens:
            raise InvalidRequest(
                f"the prompt has {sequence.num_prompt_tokens} tokens, more than max_num_tokens {self._max_num_tokens} "
                "allows without enable_chunked_context"
            )
        sequence.order = (1, -sequence.request.priority, self._num_arrived)
        self._num_arrived += 1
        self._waiting.push(sequence)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int = 0) -> SchedulerOutput | None:
        """The next step, counted as launched, or None if nothing can run before an outstanding step is updated."""
        # Decoding sequences come first: a token of the step is kept for each of them before prompts get any.
        step = _Step(self._max_num_tokens - self._num_decoding)
        self._continue_running(step)
        if self._waiting:
            self._start_waiting(step, now_ns)
        if not step.rows:
            if self._waiting and not self._running and not self._outstanding:
                raise RuntimeError("the queue's head does not fit into an empty KV cache")
            return None
        output = SchedulerOutput(
            new_sequences=step.new_sequences, rows=step.rows, samples_late=self._num_masked > 0 and bool(step.sampling)
        )
        self._outstanding.append((output, step))
        for sequence in step.prefilling:
            self.kv_cache.cache_blocks(sequence)
        # Only now: a prefix is shared from the next step on, so that within one nobody reads what another writes.
        return output

    def _continue_running(self, step: _Step) -> None:
        """What is left to compute of every running sequence, in the order of their start: a piece of a prompt, a token.

        Whoever is paused to make room is the last of the list, so never one that is already part of the step.
        """
        running, block_size = self._running, self.kv_cache.block_size
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            length = len(sequence.token_ids) + sequence.num_pending
            if length >= sequence.max_length:
                continue  # its last token is under way
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

    def _add_row(self, sequence: Sequence, num_tokens: int, new_block_ids: list[int], step: _Step) -> None:
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = end = start + num_tokens
        token_ids, samples = NONE, True
        if start < sequence.num_prefill_tokens:
            token_ids, samples = sequence.token_ids[start:end], end == sequence.num_prefill_tokens
            step.budget -= num_tokens
            step.prefilling.append(sequence)
            self._num_decoding += samples
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
            )
        )

    # -- starting, pausing ---------------------------------------------------------------------------------------------

    def _start_waiting(self, step: _Step, now_ns: int) -> None:
        """Start the queue's head as long as it fits: into rows, into what is left of the step, into memory.

        One that did not fit into memory is not looked at again before there is more room: a long prompt costs a
        look-up for each of its blocks.
        """
        if self._policy is SchedulerPolicy.STATIC_BATCH and not self._running:
            self._batch_quota = len(self._waiting)
        room = self.kv_cache.num_free_blocks
        if self._policy is not SchedulerPolicy.MAX_UTILIZATION:
            room -= self._num_missing_blocks
        while self._waiting and self._free_rows and step.budget > 0 and self._may_join():
            sequence = self._waiting.head()
            if sequence.num_pending or (self._refused and self._refused[0] is sequence and room <= self._refused[1]):
                break
            computed_blocks = self.kv_cache.get_computed_blocks(sequence)
            num_tokens = self._first_chunk(sequence, computed_blocks, step.budget)
            if num_tokens == 0:
                break
            needed = self._num_blocks_to_start(sequence, computed_blocks)
            if needed > room:
                self._refused = (sequence, room)
                self._batch_quota = 0
                break
            self._start(self._waiting.pop(), computed_blocks, num_tokens, step, now_ns)
            room -= needed

    def _may_join(self) -> bool:
        return self._policy is not SchedulerPolicy.STATIC_BATCH or self._batch_quota > 0

    def _first_chunk(self, sequence: Sequence, computed_blocks: list[int], budget: int) -> int:
        """Tokens of its first step; 0 if a prompt that may not be cut does not fit into this one.

        Generated tokens can make a sequence longer than any step, so one that continues may always be cut.
        """
        remaining = len(sequence.token_ids) - len(computed_blocks) * self.kv_cache.block_size
        if remaining <= budget:
            return remaining
        continues = sequence.status is SequenceStatus.PAUSED or sequence.num_output_tokens > 0
        return budget if self._enable_chunked_context or continues else 0

    def _num_blocks_at_longest(self, sequence: Sequence) -> int:
        return self.kv_cache.num_blocks_for(sequence.max_length - 1)

    def _num_blocks_to_start(self, sequence: Sequence, computed_blocks: list[int]) -> int:
        """Free blocks it must find: for itself at its longest or, where it may be paused, for what it is now."""
        length = sequence.max_length - 1
        if self._policy is SchedulerPolicy.MAX_UTILIZATION:
            length = min(length, len(sequence.token_ids) + 1)
        return self.kv_cache.num_blocks_taken(length, computed_blocks)

    def _start(self, sequence: Sequence, computed_blocks: list[int], num_tokens: int, step: _Step, now_ns: int) -> None:
        new_block_ids = self.kv_cache.allocate_slots(sequence, num_tokens, computed_blocks)
        assert new_block_ids is not None, "there was room for it"
        self.kv_cache.count_missed(sequence)
        sequence.row = heapq.heappop(self._free_rows)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_prefill_tokens = len(sequence.token_ids)
        sequence.first_scheduled_time_ns = sequence.first_scheduled_time_ns or now_ns
        sequence.order = (0, 0.0, self._num_started)  # its place in the queue, should it be paused
        self._num_started += 1
        self._running.append(sequence)
        self._batch_quota -= 1
        self._num_missing_blocks += self._num_blocks_at_longest(sequence) - len(sequence.block_ids)
        self._num_masked += sequence.mask_slot != NO_SLOT
        step.new_sequences.append(
            NewSequence(
                row=sequence.row,
                token_ids=list(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                block_ids=list(sequence.block_ids),
                sampling_config=sequence.sampling_config,
                end_ids=sequence.request.end_ids,
                bad_words=sequence.request.bad_words,
                outputs=sequence.outputs,
                num_log_probs=sequence.request.output_config.num_log_probs,
                adapter_slot=sequence.adapter_slot,
                mask_slot=sequence.mask_slot,
            )
        )
        self._add_row(sequence, num_tokens, NONE, step)

    def _allocate(self, sequence: Sequence, num_tokens: int, step: _Step) -> list[int] | None:
        """New blocks for a running sequence; None if the sequence itself had to be paused.

        If memory is short, those that started last are paused until there is room. What is left free then is less than
        the last one paused had held, so it starts again in this step only if others hold part of its blocks.
        """
        while (new_block_ids := self.kv_cache.allocate_slots(sequence, num_tokens)) is None:
            if self._policy is not SchedulerPolicy.MAX_UTILIZATION:
                raise RuntimeError("a started sequence found no KV cache block that was reserved for it")
            victim = self._running.pop()
            step.budget += victim.is_decoding  # the token that was kept for it
            self._release(victim)
            victim.status = SequenceStatus.PAUSED
            self._waiting.push(victim)
            if victim is sequence:
                return None
        self._num_missing_blocks -= len(new_block_ids)
        return new_block_ids

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def update(self, scheduled: SchedulerOutput, output: StepOutput, now_ns: int = 0) -> list[Sequence]:
        """Take in the oldest outstanding step. Returns who got tokens, ended or failed, in the order of the rows."""
        expected, step = self._outstanding.popleft()
        sequences = step.sampling
        assert scheduled is expected, "steps must be updated in the order they were scheduled"
        assert len(sequences) == len(output.token_ids), "a step must answer every sampling row"
        rows = scheduled.sampling_rows if output.errors or output.tensors else []
        for row, tensors in output.tensors.items():
            gathered = step.gathering[row].gathered
            if gathered is not None and not step.gathering[row].is_finished:
                gathered.add_prompt(tensors)
        progressed: list[Sequence] = []
        some_finished = False
        block_size = self.kv_cache.block_size
        for index, sequence in enumerate(sequences):
            sequence.num_pending -= 1
            if sequence.status is SequenceStatus.FINISHED:
                continue
            progressed.append(sequence)
            if rows and rows[index] in output.errors:
                self._fail(sequence, StepFailed(output.errors[rows[index]]))
                some_finished = True
                continue
            log_probs = output.log_probs[index] if sequence.wants_log_probs and output.log_probs is not None else None
            num_before = len(sequence.token_ids)
            reason = self._append(sequence, output.token_ids[index], log_probs, now_ns)
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

    def _append(
        self, sequence: Sequence, token_ids: list[int], log_probs: list[float] | None, now_ns: int
    ) -> FinishReason:
        """Add the step's tokens up to the one that ends the sequence; that one belongs to the output as well."""
        if sequence.first_token_time_ns == 0:
            sequence.first_token_time_ns = now_ns
        sequence.last_token_time_ns = now_ns
        for index, token_id in enumerate(token_ids):
            sequence.token_ids.append(token_id)
            if log_probs is not None:
                sequence.log_probs.append(log_probs[index])
                sequence.cum_log_prob += log_probs[index]
            reason = sequence.reason_to_finish()
            if reason:
                return reason
        return FinishReason.NOT_FINISHED

    def stop(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence from outside, whatever its state, and free all it holds."""
        if not sequence.is_finished:
            was_running = sequence.status is SequenceStatus.RUNNING
            self._finish(sequence, reason)
            if was_running:
                self._drop_finished()

    def abandon(self, error: RequestError) -> list[Sequence]:
        """Give up every outstanding step and whoever depends on one, because a step failed.

        Returns the sequences that were lost: all that run, and the paused ones whose last token was never seen. The
        others have nothing in the KV cache and stay in the queue; the cache itself is forgotten.
        """
        pending = sorted((sequence for sequence in self._waiting if sequence.num_pending), key=lambda s: s.order)
        lost = [*self._running, *pending]
        self._outstanding.clear()
        for sequence in lost:
            self._fail(sequence, error)
        self._drop_finished()
        self.kv_cache.reset()
        return lost

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._release(sequence)
        sequence.status = SequenceStatus.FINISHED

    def _fail(self, sequence: Sequence, error: RequestError) -> None:
        sequence.error = error
        self._release(sequence, trusted=False)
        sequence.status = SequenceStatus.FINISHED

    def _release(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Take back its blocks and its row, or its place in the queue."""
        if sequence.status is SequenceStatus.RUNNING:
            self._num_decoding -= sequence.is_decoding
            self._num_missing_blocks -= self._num_blocks_at_longest(sequence) - len(sequence.block_ids)
            self._num_masked -= sequence.mask_slot != NO_SLOT
            heapq.heappush(self._free_rows, sequence.row)
            sequence.row = -1
        else:
            self._waiting.discard(sequence)
        self.kv_cache.free(sequence, trusted=trusted)

    def _drop_finished(self) -> None:
        self._running = [sequence for sequence in self._running if not sequence.is_finished]

    def check(self) -> None:
        """Raise AssertionError unless rows, blocks and counts are exactly what the sequences say."""
        assert sorted([*self._free_rows, *(s.row for s in self._running)]) == list(range(self.max_batch_size))
        assert all(sequence.status is SequenceStatus.RUNNING for sequence in self._running)
        waiting = list(self._waiting)
        assert len(waiting) == len(self._waiting)
        assert self.num_paused == sum(sequence.status is SequenceStatus.PAUSED for sequence in waiting)
        assert not any(sequence.block_ids or sequence.row >= 0 for sequence in waiting)
        assert self._num_decoding == sum(sequence.is_decoding for sequence in self._running)
        missing = (self._num_blocks_at_longest(s) - len(s.block_ids) for s in self._running)
        assert self._num_missing_blocks == sum(missing)
        assert self._num_masked == sum(sequence.mask_slot != NO_SLOT for sequence in self._running)
        self.kv_cache.check(self._running)
