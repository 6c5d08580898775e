"""A step while the Scheduler puts it together."""

from __future__ import annotations

from inflight.batch_manager.kept_states import NO_STATE
from inflight.batch_manager.running_batch import RunningBatch
from inflight.batch_manager.sequence import Sequence
from inflight.batch_manager.sequence_states import SequenceStates
from inflight.block_groups import BlockGroups
from inflight.scheduler_output import DRAFTED, NO_BLOCK, NO_DRAFT, NO_SLOT, Arrival, Export, NewSequence, RowWork

NONE: list[int] = []
"""Shared by all rows without new blocks or tokens from the host: nearly every row of every step. Never written to."""
NO_STATES: list[tuple[int, int]] = []
"""Likewise."""


class Step:
    """What becomes a SchedulerOutput, and whose it is."""

    __slots__ = (
        "_batch",
        "_groups",
        "_is_staged",
        "_states",
        "adapter_loads",
        "arrivals",
        "block_copies",
        "budget",
        "drafts",
        "forks",
        "gathering",
        "new_sequences",
        "num_places",
        "pooled",
        "prefilling",
        "rows",
        "sampling",
        "state_copies",
    )

    def __init__(
        self,
        budget: int,
        batch: RunningBatch,
        groups: BlockGroups,
        *,
        is_staged: bool = False,
        states: SequenceStates | None = None,
    ) -> None:
        """`is_staged`: pipeline stages compute it. The first does not know what the last has sampled, so the host tells
        it every token. `states`: of sequences; None = no layer keeps one."""
        self.budget = budget
        """Tokens left for prompts."""
        self.num_places = batch.num_free_rows
        """Rows that no sequence has: as many drafts may take their places in the batch. So a full batch has none."""
        self.new_sequences: list[NewSequence] = []
        self.rows: list[RowWork] = []
        self.block_copies: list[tuple[int, int]] = []
        self.adapter_loads: list[tuple[int, int]] = []
        self.arrivals: list[Arrival] = []
        self.sampling: list[Sequence] = []
        """Who gets a token: the order of SchedulerOutput.sampling_rows."""
        self.drafts: dict[int, int] = {}
        """Index in `sampling` -> number of drafts that are verified."""
        self.prefilling: list[Sequence] = []
        """Who computes tokens of its prompt, or takes a row."""
        self.pooled: list[Sequence] = []
        """Whose prompt it completes, and who get no token."""
        self.gathering: dict[int, Sequence] = {}
        """By row, those that ask for tensors."""
        self.forks: list[tuple[Sequence, Sequence]] = []
        """Sequences that took a row to continue the prompt of a sibling, each with that sibling."""
        self._batch = batch
        self.state_copies: list[tuple[int, int]] = []
        self._groups = groups
        self._is_staged = is_staged
        self._states = states

    def add(
        self,
        sequence: Sequence,
        num_tokens: int,
        new_block_ids: list[int],
        drafts: list[int] = NONE,
        passed: list[int] = NONE,
    ) -> None:
        """Let a running sequence that has the blocks for it compute its next `num_tokens` tokens, the last of which are
        `drafts`. `passed`: places of blocks that it has given back."""
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = end = start + num_tokens
        token_ids, samples, is_chosen, unseen_token_ids = NONE, True, False, NONE
        if start < sequence.num_prefill_tokens:
            token_ids, samples = sequence.token_ids[start:end], end == sequence.num_prefill_tokens
            if not sequence.is_placed:
                self._place(sequence, start)
                new_block_ids = passed = NONE
            self.budget -= num_tokens
            self.prefilling.append(sequence)
            if samples:
                self._batch.note_prefilled(sequence)
            elif sequence.is_pooled and end == len(sequence.token_ids):
                self.pooled.append(sequence)
        elif sequence.beams is not None:
            token_ids, is_chosen = sequence.token_ids[start:end], True
            if not sequence.is_placed:
                self._place(sequence, start)
                new_block_ids = passed = NONE
                self.prefilling.append(sequence)
        elif sequence.speculation is not None:
            token_ids, is_chosen = drafts, not sequence.num_pending
            if is_chosen:
                token_ids = [sequence.token_ids[start], *drafts]
            if drafts:
                sequence.speculation.is_verifying = True
                self.drafts[len(self.sampling)] = len(drafts)
                self.budget -= len(drafts)
                self.num_places -= len(drafts)
                if drafts[0] == DRAFTED:
                    unseen_token_ids = self._unseen(sequence, sequence.speculation.num_seen, start)
        elif self._is_staged:
            token_ids, is_chosen = sequence.token_ids[start:end], True
        draft_index = NO_DRAFT
        if samples:
            if sequence.speculation is not None:
                draft_index = sequence.speculation.draft_index(sequence.token_ids, sequence.num_pending)
            sequence.num_pending += 1
            self.sampling.append(sequence)
        if sequence.gathered is not None:
            self.gathering[sequence.row] = sequence
        kept_states = NO_STATES
        if self._states is not None:
            source = self._states.take_source(sequence)
            if source != NO_STATE:
                self.state_copies.append((source, sequence.row))
            kept_states = self._states.keep(sequence, start, end, len(drafts))
        self.rows.append(
            RowWork(
                row=sequence.row,
                start=start,
                num_tokens=num_tokens,
                token_ids=token_ids,
                new_block_ids=new_block_ids,
                passed_blocks=passed,
                num_sampled=int(samples) + len(drafts),
                is_chosen=is_chosen,
                draft_index=draft_index,
                unseen_token_ids=unseen_token_ids,
                kept_states=kept_states,
            )
        )

    def exports(self) -> list[Export]:
        """Of the prompts that it completes, those that other ranks are to get. One whose state found no slot, or whose
        blocks are given back because more is computed behind it, is not handed over: they compute it."""
        found = []
        for sequence in self.prefilling:
            key, slot = sequence.export_key, NO_SLOT
            if key and sequence.is_decoding:
                if self._states is not None:
                    slot = sequence.states.behind_prompt
                    if slot == NO_STATE:
                        continue
                places = self._groups.handed_over(sequence.num_prompt_tokens)
                blocks = [sequence.block_ids[place] for place in places]
                if NO_BLOCK not in blocks:
                    found.append(Export(key=key, blocks=blocks, slot=slot))
        return found

    def _unseen(self, sequence: Sequence, num_seen: int, start: int) -> list[int]:
        """The tokens before `start` that the draft model has to catch up with: as many of the last ones as half of what
        is left for prompts."""
        first = max(num_seen, sequence.num_prefill_tokens, start - self.budget // 2)
        if first >= start:
            return NONE
        self.budget -= start - first
        return sequence.token_ids[first:start]

    def _place(self, sequence: Sequence, start: int) -> None:
        """Describe to the runner a sequence whose first row begins at position `start`."""
        sequence.is_placed = True
        if sequence.tail_blocks:
            first = start // self._groups.block_size * len(sequence.tail_blocks)
            own = sequence.block_ids[first : first + len(sequence.tail_blocks)]
            self.block_copies += zip(sequence.tail_blocks, own, strict=True)
        self.new_sequences.append(sequence.describe())
