"""Decides what one step computes. What comes of it is in outcomes.py.

In-flight batching with chunked prefill: a step holds the next token of every decoding sequence and, in what is left of
`max_num_tokens`, chunks of prompts. Sequences start by (priority, arrival); none starts before the queue's head. Where
`priority_preemption` says so, the head displaces running ones of lower priority (see preemption.py).

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
it, those with one do not. In a static batch it keeps its place meanwhile.

Where the layers are distributed over pipeline stages, each of them computes another step at the same time. A sequence
then waits for its token before it decodes again, and a step takes an even share of the decoding sequences only: as many
steps as there are stages, over different sequences, keep all stages busy. The chunks of a prompt do not wait for each
other.

Knows no tensors, no clock, no callbacks: the same calls lead to the same decisions on every rank.
"""

from __future__ import annotations

from collections import deque

from inflight.batch_manager.admission import Admission
from inflight.batch_manager.beam_group import BeamGroup
from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.outcomes import Outcomes
from inflight.batch_manager.preemption import displaced_by
from inflight.batch_manager.prefix import Prefix
from inflight.batch_manager.running_batch import RunningBatch
from inflight.batch_manager.sequence import Sequence, SequenceStatus
from inflight.batch_manager.speculation.draft_count import DraftCount
from inflight.batch_manager.speculation.drafter import NO_DRAFTS
from inflight.batch_manager.speculation.speculation import Speculation
from inflight.batch_manager.step import NO_STATES, NONE, Step
from inflight.batch_manager.waiting_queue import WaitingQueue
from inflight.block_groups import MOST_AHEAD
from inflight.config import SchedulerPolicy
from inflight.errors import InvalidRequest, RequestError
from inflight.result import FinishReason
from inflight.scheduler_output import SchedulerOutput, StepOutput


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
        priority_preemption: bool = False,
        num_stages: int = 1,
    ) -> None:
        """`max_batch_size`: rows of a step. `max_num_tokens`: tokens of a step. `max_seq_len`: tokens of a sequence.
        `num_adapter_slots`: adapters that its rows may use. `priority_preemption`: the queue's head may displace
        running sequences of lower priority. `num_stages`: pipeline stages that compute a step."""
        if max_num_tokens < max_batch_size:
            raise ValueError(f"max_num_tokens ({max_num_tokens}) must be at least max_batch_size ({max_batch_size})")
        self.kv_cache = kv_cache
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_num_tokens = max_num_tokens
        self.max_tokens_beside_decodes = max_num_tokens
        """Tokens of a step in which sequences decode; prompts get a block's tokens of it at least."""
        self.num_stages = num_stages
        self._enable_chunked_context = enable_chunked_context
        self._admission = Admission(kv_cache, policy, enable_chunked_context)
        self._preempts = priority_preemption
        self._waiting = WaitingQueue()
        self._batch = RunningBatch(kv_cache, max_batch_size, num_adapter_slots, by_priority=priority_preemption)
        self._outstanding: deque[tuple[SchedulerOutput, Step]] = deque()
        self._num_arrived = 0
        self.draft_count = DraftCount()
        """Of what `update` has found since GptManager's iteration began."""
        self._outcomes = Outcomes(kv_cache, self._batch, self._waiting, self.draft_count)

    @property
    def num_running(self) -> int:
        """A beam search counts once, here and in `num_paused`."""
        return len(self._batch)

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
        sequence.order = (-sequence.request.priority, 1, self._num_arrived)
        self._num_arrived += 1
        self._waiting.push(sequence)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int = 0) -> SchedulerOutput | None:
        """The next step, counted as launched, or None if nothing can run before `update` of an outstanding step."""
        if self._preempts and self._waiting.has_head:
            self._displace_for(self._waiting.head())
        # Decoding sequences come first: one token of the step is reserved for each before prompts get any.
        num_decoding = self._batch.num_decoding
        budget = self.max_num_tokens - num_decoding
        if num_decoding:
            budget = min(budget, max(self.max_tokens_beside_decodes - num_decoding, self.kv_cache.block_size))
        step = Step(
            budget,
            self._batch,
            self.kv_cache.groups,
            is_staged=self.num_stages > 1,
            states=self.kv_cache.states,
        )
        self._continue_running(step)
        if self._waiting:
            self._start_waiting(step, now_ns)
        self._batch.share(step.prefilling, step.forks)
        if not step.rows:
            if self._waiting and not self._batch and not self._outstanding:
                raise RuntimeError("the queue's head does not fit into an empty KV cache")
            return None
        transfers = self.kv_cache.take_transfers()
        states = self.kv_cache.states
        state_offloads, state_onboards = (NO_STATES, NO_STATES) if states is None else states.slots.take_transfers()
        output = SchedulerOutput(
            new_sequences=step.new_sequences,
            rows=step.rows,
            block_copies=step.block_copies + transfers.copies,
            state_copies=step.state_copies,
            state_offloads=state_offloads,
            state_onboards=state_onboards,
            offloads=transfers.offloads,
            onboards=transfers.onboards,
            arrivals=step.arrivals,
            exports=step.exports(),
            scrubbed_block_ids=transfers.scrubbed,
            adapter_loads=step.adapter_loads,
            samples_late=self.num_stages == 1 and self._batch.num_guided > 0 and bool(step.sampling),
        )
        self._outstanding.append((output, step))
        return output

    def _continue_running(self, step: Step) -> None:
        """Add the remaining work of every running sequence, a chunk of a prompt or one token, in order of their start.

        The sequence that is paused to free blocks is the last of the list, so never one that is already in the step.
        """
        running, block_size, num_groups = self._batch.sequences, self.kv_cache.block_size, len(self.kv_cache.groups)
        most_sampling = -(-self._batch.num_decoding // self.num_stages)
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            if self.num_stages > 1 and sequence.is_decoding:
                is_full = len(step.sampling) >= most_sampling
                if is_full or sequence.has_pending:
                    continue
            if sequence.beams is not None:
                self._continue_beams(sequence.beams, step)
                continue
            length = len(sequence.token_ids) + sequence.num_pending
            if length >= sequence.max_length:
                continue  # an outstanding step samples its last token
            start = sequence.num_computed_tokens
            num_tokens, drafts = length - start, NO_DRAFTS
            if start < sequence.num_prefill_tokens:
                num_tokens = min(num_tokens, step.budget)
                if num_tokens == 0:
                    continue
            elif sequence.speculation is not None:
                if sequence.speculation.must_wait(sequence.token_ids, sequence.num_pending):
                    continue
                drafts = self._propose(sequence, sequence.speculation, step)
                num_tokens += len(drafts)
            new_block_ids, passed = NONE, NONE
            if (start + num_tokens) * num_groups > len(sequence.block_ids) * block_size:
                passed = self._batch.give_back(sequence)
                found = self._allocate(sequence, num_tokens, step)
                if found is None:
                    continue
                new_block_ids = found
            step.add(sequence, num_tokens, new_block_ids, drafts, passed)

    def note_forced(self, forced: dict[int, list[int]]) -> None:
        """What Runner.sample has returned for the newest step, before the next one is scheduled."""
        for sequence in self._outstanding[-1][1].sampling:
            tokens = forced.get(sequence.row)
            if tokens is not None and sequence.speculation is not None:
                sequence.speculation.note_forced(tokens, len(sequence.token_ids))

    def _propose(self, sequence: Sequence, speculation: Speculation, step: Step) -> list[int]:
        """Drafts for a decoding sequence, as far as they take nothing that another sequence may need: none while
        sequences wait, at most half of what is left for prompts, and no block for which one might have to be paused.
        """
        if self._waiting.has_head:
            return NO_DRAFTS
        length = len(sequence.token_ids) + sequence.num_pending
        most = min(step.num_places, step.budget // 2, sequence.max_length - 1 - length)
        groups = self.kv_cache.groups
        if self._admission.may_pause:
            num_spare = max(self.kv_cache.num_free_blocks - self.max_batch_size * len(groups), 0)
            num_blocks = (len(sequence.block_ids) + num_spare) // len(groups)
            most = min(most, num_blocks * groups.block_size - length)
        if groups.have_windows:
            most = min(most, MOST_AHEAD - 1 - sequence.num_pending)
        if self.kv_cache.states is not None:
            most = min(most, self.kv_cache.states.slots.num_free - 1)
        if most <= 0:
            return NO_DRAFTS
        return speculation.propose(sequence.token_ids, num_pending=sequence.num_pending, most=most)

    def _continue_beams(self, group: BeamGroup, step: Step) -> None:
        """Add what is due of a beam search. If blocks are short it is paused before any of its rows is in the step."""
        budget, num_missing = step.budget, 0
        work: list[tuple[Sequence, int, list[int]]] = []
        for beam in group.due():
            num_tokens = len(beam.token_ids) - beam.num_computed_tokens
            if not beam.is_decoding:
                num_tokens = min(num_tokens, budget)
                budget -= num_tokens
            if num_tokens:
                missing = self.kv_cache.num_missing(beam, num_tokens)
                work.append((beam, num_tokens, self._batch.give_back(beam) if missing else NONE))
                num_missing += missing
        while num_missing > self.kv_cache.num_free_blocks:
            if self._pause_for_blocks(step) is group.leader:
                return
        for beam, num_tokens, passed in work:
            new_block_ids = self._batch.allocate(beam, num_tokens)
            assert new_block_ids is not None, "there was room for it"
            step.add(beam, num_tokens, new_block_ids, passed=passed)

    # -- starting, pausing ---------------------------------------------------------------------------------------------

    def _displace_for(self, head: Sequence) -> None:
        if self._has_adapter_slot(head):
            for _ in range(displaced_by(head, self._batch, self._admission, self.kv_cache)):
                self._pause_last()

    def _start_waiting(self, step: Step, now_ns: int) -> None:
        """Start the queue's head while there is a row, tokens are left in the step, and there are enough blocks."""
        admission = self._admission
        if not self._batch:
            admission.open_batch(len(self._waiting))
        room = admission.room(self._batch.num_missing_blocks)
        while self._waiting.has_head and self._batch.num_free_rows and step.budget > 0:
            if not admission.is_open(self._waiting.num_aside):
                break
            sequence = self._waiting.head()
            if not self._has_adapter_slot(sequence):
                self._waiting.set_aside()
                continue
            if self._batch.num_free_rows < len(sequence.members):
                break
            if sequence.has_pending or admission.is_refused(sequence, room):
                break
            prefix = admission.find_prefix(sequence, room)
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
        return not self._waiting.num_aside and self._batch.adapters.has_room(sequence)

    def _start(self, sequence: Sequence, prefix: Prefix, num_tokens: int, step: Step, now_ns: int) -> None:
        """Give it a row and its first tokens of the step; who forks from a sibling gets them in the next step."""
        step.adapter_loads += self._batch.start(sequence, now_ns)
        if prefix.source is not None:
            step.forks.append((sequence, prefix.source))
            return
        if prefix.has_arrived:
            step.arrivals.append(self.kv_cache.start_on_arrived(sequence, prefix))
            new_block_ids = self.kv_cache.allocate_slots(sequence, num_tokens)
        else:
            new_block_ids = self.kv_cache.allocate_slots(sequence, num_tokens, prefix.block_ids, prefix.partial)
        assert new_block_ids is not None, "there was room for it"
        self.kv_cache.count_missed(sequence)
        self._batch.count_blocks(sequence)
        step.add(sequence, num_tokens, NONE)

    def _start_beams(self, group: BeamGroup, step: Step, now_ns: int) -> None:
        """Start its sequences together, those that hold a beam on the blocks that are cached of it."""
        live = group.live
        step.adapter_loads += self._batch.start(group.leader, now_ns)
        for sequence in group.sequences:
            if sequence in live:
                self.kv_cache.allocate_slots(sequence, 0, self.kv_cache.find_prefix(sequence).block_ids)
                self.kv_cache.count_missed(sequence)
            self._batch.count_blocks(sequence)
        group.restart()
        self._continue_beams(group, step)

    def _allocate(self, sequence: Sequence, num_tokens: int, step: Step) -> list[int] | None:
        """New blocks for a running sequence; None if the sequence itself had to be paused.

        If there are too few free blocks, sequences are paused, the last of the batch first. Then fewer blocks are left
        free than the last one paused had held, so it starts again in this step only if others hold part of its blocks.
        """
        while (new_block_ids := self._batch.allocate(sequence, num_tokens)) is None:
            if self._pause_for_blocks(step) is sequence:
                return None
        return new_block_ids

    def _pause_for_blocks(self, step: Step) -> Sequence:
        """Pause the last of the batch, and return it."""
        if not self._admission.may_pause:
            raise RuntimeError("a started sequence found no KV cache block that was reserved for it")
        num_decoding = self._batch.num_decoding
        victim = self._pause_last()
        step.budget += num_decoding - self._batch.num_decoding  # the tokens that were kept for it
        return victim

    def _pause_last(self) -> Sequence:
        """Pause the last sequence of the batch, with all beams of its search, and return it."""
        victim = self._batch.sequences.pop()
        for member in victim.members:
            self._outcomes.release(member)
            member.status = SequenceStatus.PAUSED
        self._waiting.push(victim)
        return victim

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def update(self, scheduled: SchedulerOutput, output: StepOutput, now_ns: int = 0) -> list[Sequence]:
        """Apply the results of the oldest outstanding step. Returns the sequences that got tokens, finished or failed,
        in the order of the rows."""
        expected, step = self._outstanding.popleft()
        assert scheduled is expected, "steps must be updated in the order they were scheduled"
        return self._outcomes.apply(step, scheduled, output, now_ns)

    def stop(self, sequence: Sequence, reason: FinishReason, *, trusted: bool = True) -> None:
        """Finish a sequence in any state, with all beams of its search, and free its row and blocks.

        `trusted=False`: a sibling's values were wrong, and so were those of the blocks that they share: none of its
        blocks may be reused.
        """
        if not sequence.is_finished:
            was_running = sequence.status is SequenceStatus.RUNNING
            self._outcomes.finish(sequence, reason, trusted=trusted)
            if was_running:
                self._batch.drop_finished()

    def abandon(self, error: RequestError) -> list[Sequence]:
        """Drop all outstanding steps, because one failed, and fail the sequences that depend on them.

        Returns these sequences: all running ones, and the paused ones with a token still on the device. The others
        have nothing in the KV cache and stay in the queue. All cached prefixes are forgotten.
        """
        pending = sorted((sequence for sequence in self._waiting if sequence.has_pending), key=lambda s: s.order)
        lost = [*self._batch.sequences, *pending]
        self._outstanding.clear()
        for sequence in lost:
            self._outcomes.fail(sequence, error)
        self._batch.drop_finished()
        self.kv_cache.reset()
        self._batch.adapters.reset()  # a step that fills a slot may not have run
        return lost

    def check(self) -> None:
        """Raise AssertionError unless rows, blocks and counts agree with the states of the sequences."""
        waiting = list(self._waiting)
        assert len(waiting) == len(self._waiting)
        assert self.num_paused == sum(sequence.status is SequenceStatus.PAUSED for sequence in waiting)
        assert not any(member.block_ids or member.row >= 0 for sequence in waiting for member in sequence.members)
        self._batch.check()
        # What a beam is to copy its parent holds too, and passes only behind the copy: nothing is reserved for it.
        tails = [beam.tail_blocks for leader in self._batch.sequences if leader.beams for beam in leader.members]
        room = self._admission.room(self._batch.num_missing_blocks) + sum(map(len, tails))
        assert self._admission.may_pause or room >= 0, "a block that was reserved is not there"
