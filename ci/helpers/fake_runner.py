"""A runner without a network: predictable tokens from a simulated KV memory, and assertions on the schedule.

The state of each token (see fake_network.py) lies in the simulated memory, and is read back through the row's block
table, as attention would. So a block that was overwritten, shared wrongly or not yet written is found in the step that
reads it. Each group of layers has it in blocks of its own, and sees no more than its window. With `num_state_slots` the
same states also lie in slots, as those of a recurrence would: each row goes on from the one in its slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from fake_network import VOCAB_SIZE, candidates, fold, log_prob_of, mask_end, next_token, states_of, weigh
from msgspec import structs

from inflight.block_groups import BlockGroups
from inflight.request import Request
from inflight.scheduler_output import (
    BEAM_LOG_PROBS,
    DRAFTED,
    LOG_PROBS,
    NO_DRAFT,
    Array,
    NewSequence,
    RowTensors,
    RowWork,
    SchedulerOutput,
    StepOutput,
    top_names,
)

NO_BLOCK = -1
EMPTY = -1
"""What memory holds that nobody has written."""


def _as_array(tokens: list[int]) -> Array:
    return np.array(tokens, dtype=np.float32)[:, None]


class Row:
    """The runner's persistent state of one row."""

    def __init__(self, new: NewSequence, num_groups: int) -> None:
        self.new = new
        self.num_groups = num_groups
        self.token_ids = list(new.token_ids)
        self.num_computed: int | None = None
        self.block_ids = list(new.block_ids)
        self.sampled: list[int] = []  # tokens of the latest step
        self.is_uncertain = False  # how many tokens it has
        self.num_seen = 0  # leading tokens that the draft model has computed, or never will
        self.num_left_out = 0  # of these, those that it never will

    @property
    def is_beam(self) -> bool:
        return BEAM_LOG_PROBS in self.new.outputs

    def slot(self, position: int, block_size: int, group: int = 0) -> int:
        block_id = self.block_ids[position // block_size * self.num_groups + group]
        assert block_id >= 0, "a block that the row does not have"
        return block_id * block_size + position % block_size


class FakeRunner:
    """Implements inflight.runtime.runner.Runner. What it asserts would be a silently wrong result on a device."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_batch_size: int,
        max_num_tokens: int,
        num_stages: int = 1,
        num_host_blocks: int = 0,
        num_state_slots: int | None = None,
        num_host_state_slots: int = 0,
        windows: tuple[int, ...] = (0,),
        fail_launch: Callable[[int], bool] = lambda step: False,
        fail_collect: Callable[[int], bool] = lambda step: False,
        row_error: Callable[[Row], str | None] = lambda row: None,
        forced: Callable[[Row], list[int]] = lambda row: [],
        is_lasting: Callable[[Exception], bool] = lambda error: False,
    ) -> None:
        """`num_stages`: pipeline stages. With several, the host must know every token of a step. `num_state_slots`:
        besides those of rows and padding; None = the network has no recurrence. `num_host_state_slots`: for states in
        host memory. `windows`: see BlockGroups.

        `fail_*`: given the number of the step, from 0, whether it raises. `row_error`: a row that cannot go on.
        `forced`: what a guided row that is about to sample is told to be forced. `is_lasting`: whether a step's
        exception is of an error that stays."""
        self.block_size = block_size
        self.windows = windows
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.num_stages = num_stages
        self.max_outstanding = max(2, num_stages)
        self.memory = [EMPTY] * (num_blocks * block_size)
        self.host_memory = [EMPTY] * (num_host_blocks * block_size)
        self.slots: list[int] | None = None
        if num_state_slots is not None:
            self.slots = [EMPTY] * (max_batch_size + 1 + num_state_slots)
        self.host_slots = [EMPTY] * num_host_state_slots
        self.exported: dict[bytes, list[int]] = {}
        """Prompts that other runners may take: key -> content of their blocks, and behind it the state."""
        self.arrived: dict[int, list[int]] = {}
        """By request id, what other runners had exported."""
        self.rows: dict[int, Row] = {}
        self.launched: list[SchedulerOutput] = []
        self.num_launches = 0
        self.closed = False
        self._outstanding: deque[tuple[int, StepOutput | Exception]] = deque()
        self._unsampled: tuple[int, SchedulerOutput] | None = None
        self._fail_launch, self._fail_collect, self._row_error = fail_launch, fail_collect, row_error
        self._forced = forced
        self._is_lasting = is_lasting

    def forward(self, scheduled: SchedulerOutput) -> int:
        step, self.num_launches = self.num_launches, self.num_launches + 1
        if self._fail_launch(step):
            self._lose_memory()
            raise RuntimeError(f"launch {step} failed")
        assert len(self._outstanding) < self.max_outstanding, "too many steps at once"
        assert self._unsampled is None, "a step was started before the one before it was sampled"
        self._check_shape(scheduled)
        self.launched.append(scheduled)
        self._transfer(scheduled)
        for new in scheduled.new_sequences:
            self.rows[new.row] = Row(new, len(self.windows))
        work = [(self.rows[part.row], part, self._take_in(part)) for part in scheduled.rows]
        # Every row writes before any reads: what a row reads of another's must have been there before the step.
        read = [self._read_prefix(row, part.start, part.start) for row, part, _ in work]
        for (row, part, token_ids), state in zip(work, read, strict=True):
            self._write(row, part.start, token_ids, state)
        for _, part, token_ids in work:
            self._recur(part, token_ids)
        for row, part, _ in work:
            self._read_prefix(row, part.start, part.start + part.num_tokens)
        for export in scheduled.exports:
            content = [state for block_id in export.blocks for state in self.memory[self._slots(block_id)]]
            self.exported[export.key] = content if self.slots is None else [*content, self.slots[export.slot]]
        self._unsampled = (step, scheduled)
        return step

    def sample(self, handle: int) -> dict[int, list[int]]:
        assert self._unsampled is not None and self._unsampled[0] == handle, "the second half of no step"
        (step, scheduled), self._unsampled = self._unsampled, None
        if scheduled.samples_late:
            assert not self._outstanding, "the host does not know yet what the masks depend on"
        forced = {row: tokens for row in scheduled.sampling_rows if (tokens := self._forced(self.rows[row]))}
        output = self._sample(scheduled)
        output = structs.replace(output, tensors=self._tensors(scheduled))
        failed = RuntimeError(f"step {step} failed") if self._fail_collect(step) else None
        self._outstanding.append((step, failed or output))
        return forced

    def collect(self, handle: int) -> StepOutput:
        step, outcome = self._outstanding.popleft()
        assert handle == step, "steps must be collected in launch order"
        if isinstance(outcome, Exception):
            self._lose_memory()
            raise outcome
        return outcome

    def _lose_memory(self) -> None:
        """A failed step leaves undefined content, also in what was copied."""
        self.memory, self.host_memory = [EMPTY] * len(self.memory), [EMPTY] * len(self.host_memory)
        if self.slots is not None:
            self.slots, self.host_slots = [EMPTY] * len(self.slots), [EMPTY] * len(self.host_slots)

    def survives(self, error: Exception) -> bool:
        return not self._is_lasting(error)

    def memory_usage(self) -> tuple[int, int, int]:
        return (1000, 2000, 3000)

    def close(self) -> None:
        self.closed = True

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding) + (self._unsampled is not None)

    def _transfer(self, scheduled: SchedulerOutput) -> None:
        """The step's copies, each kind from what the one before has left."""
        self._copy_blocks(scheduled.offloads, self.memory, self.host_memory)
        self._copy_blocks(scheduled.onboards, self.host_memory, self.memory)
        sources = {source for source, _ in scheduled.block_copies}
        placed = [pair for arrival in scheduled.arrivals for pair in arrival.blocks]
        destinations = {destination for _, destination in [*scheduled.onboards, *placed, *scheduled.block_copies]}
        assert sources.isdisjoint(destination for _, destination in scheduled.block_copies), "copies depend on order"
        num_copies = len(scheduled.onboards) + len(placed) + len(scheduled.block_copies)
        assert len(destinations) == num_copies, "a block is copied to twice"
        assert any(self.windows) or destinations.issuperset(scheduled.scrubbed_block_ids)
        self._copy_blocks(scheduled.block_copies, self.memory, self.memory)
        self._copy_states(scheduled)
        for arrival in scheduled.arrivals:
            content = self.arrived.pop(arrival.request_id)
            self._copy_blocks(arrival.blocks, content, self.memory)
            assert bool(arrival.slots) is (self.slots is not None)
            for slot in arrival.slots:
                assert self.slots is not None and slot != self.max_batch_size, "the slot of padding"
                self.slots[slot] = content[-1]

    def _copy_states(self, scheduled: SchedulerOutput) -> None:
        offloads, onboards, copies = scheduled.state_offloads, scheduled.state_onboards, scheduled.state_copies
        if self.slots is None:
            assert not (offloads or onboards or copies)
            return
        assert len({place for _, place in offloads}) == len(offloads), "a slot of the host is copied to twice"
        for slot, place in offloads:
            assert slot > self.max_batch_size, "a row's state is not given up"
            self.host_slots[place] = self.slots[slot]
        sources = {source for source, _ in copies}
        rows = [row for _, row in [*onboards, *copies]]
        assert len(set(rows)) == len(rows) and sources.isdisjoint(rows), "copies depend on order"
        assert all(row < self.max_batch_size for row in rows)
        for place, row in onboards:
            self.slots[row] = self.host_slots[place]
        for source, row in copies:
            self.slots[row] = self.slots[source]

    def _recur(self, part: RowWork, token_ids: list[int]) -> None:
        """Go on from the state in the row's slot, which must be that of all its tokens before."""
        if self.slots is None:
            assert not part.kept_states
            return
        row, kept = self.rows[part.row], dict(part.kept_states)
        assert len(set(kept.values())) == len(part.kept_states), "two states in one slot"
        assert all(slot > self.max_batch_size for slot in kept.values()), "a row's slot is overwritten"
        state = self.slots[part.row] if part.start else 0
        assert not part.start or state == states_of(row.token_ids[: part.start])[-1], (
            "not the state of the row's tokens"
        )
        for index, token_id in enumerate(token_ids):
            state = fold(state, token_id)
            if index in kept:
                self.slots[kept[index]] = state
        self.slots[part.row] = state

    def arrive(self, request: Request) -> None:
        """What another runner has exported of the request's prompt is here."""
        states, content = states_of(request.input_token_ids), self.handed_over(request.input_token_ids)
        if self.slots is not None:
            content.append(states[-2] if len(states) > 1 else EMPTY)
        self.arrived[request.request_id] = content

    def handed_over(self, token_ids: list[int]) -> list[int]:
        """The content of a prompt's blocks that others need, EMPTY behind its end."""
        states = [*states_of(token_ids), *[EMPTY] * (-len(token_ids) % self.block_size)]
        places = BlockGroups(self.block_size, self.windows).handed_over(len(token_ids))
        return [state for place in places for state in states[self._slots(place // len(self.windows))]]

    def _slots(self, block_id: int) -> slice:
        return slice(block_id * self.block_size, (block_id + 1) * self.block_size)

    def _copy_blocks(self, pairs: list[tuple[int, int]], source_memory: list[int], target_memory: list[int]) -> None:
        size = self.block_size
        assert len({destination for _, destination in pairs}) == len(pairs), "a block is copied to twice"
        for source, destination in pairs:
            block = source_memory[source * size : (source + 1) * size]
            target_memory[destination * size : (destination + 1) * size] = block

    def _check_shape(self, scheduled: SchedulerOutput) -> None:
        rows = [part.row for part in scheduled.rows]
        assert rows, "an empty step"
        assert len(rows) == len(set(rows)), "a row twice in one step"
        assert all(0 <= row < self.max_batch_size for row in rows)
        assert 1 <= scheduled.num_tokens <= self.max_num_tokens, "max_num_tokens was exceeded"
        from_host = {part.row for part in scheduled.rows if part.is_prefill or part.is_chosen}
        assert {new.row for new in scheduled.new_sequences} <= from_host
        unknown = (0,) if self.num_stages > 1 else (0, 1)
        assert all(part.num_tokens - len(part.token_ids) in unknown for part in scheduled.rows)

    def _take_in(self, part: RowWork) -> list[int]:
        """The row's tokens of this step, after checking that the step goes on where the last one ended."""
        row = self.rows[part.row]
        for place in part.passed_blocks:
            assert row.block_ids[place] >= 0, "a block was given back twice"
            row.block_ids[place] = NO_BLOCK
        row.block_ids.extend(part.new_block_ids)
        if part.is_prefill:
            row.num_seen = part.start + part.num_tokens
        elif DRAFTED in part.token_ids:
            part = self._draft(part, row)
        token_ids = part.token_ids
        if part.is_chosen and row.is_beam and row.num_computed is not None:
            assert row.num_computed == len(row.token_ids), "a beam's token was not waited for"
            row.token_ids.extend(token_ids)
        if row.is_uncertain:
            assert part.is_chosen or part.is_prefill, "only the host knows how many drafts were accepted"
        row.is_uncertain = part.num_sampled > 1
        if len(token_ids) < part.num_tokens:
            assert row.num_computed == len(row.token_ids) - 1, "a decode needs the token that the row sampled last"
            token_ids = [row.token_ids[-1], *token_ids]
        if part.num_sampled > 1:
            assert part.num_sampled == part.num_tokens, "drafts follow one token"
            row.token_ids.extend(part.drafts)
        assert len(token_ids) == part.num_tokens
        assert token_ids == row.token_ids[part.start : part.start + part.num_tokens], "foreign tokens"
        if row.num_computed is not None:
            assert part.start == row.num_computed, "a position was skipped or computed twice"
        row.num_computed = part.start + part.num_tokens
        is_last = row.num_computed == len(row.token_ids)
        assert bool(part.num_sampled) == is_last, "a row samples exactly at its last known tokens"
        num_blocks, num_left = divmod(len(row.block_ids), len(self.windows))
        assert not num_left and row.num_computed <= num_blocks * self.block_size, "the block table is too short"
        return token_ids

    def _draft(self, part: RowWork, row: Row) -> RowWork:
        """The same work with drafts, of which about a fifth is wrong."""
        first = part.start - len(part.unseen_token_ids)
        assert part.unseen_token_ids == row.token_ids[first : part.start], "foreign tokens"
        assert first >= row.num_seen, "the draft model computes a token twice"
        row.num_left_out += first - row.num_seen
        row.num_seen = part.start + part.num_tokens - 1
        drafts: list[int] = []
        state = states_of(row.token_ids[: part.start + 1])[-1]
        for _ in range(part.num_tokens - 1):
            token_id = next_token(state, row.new.sampling_config.seed)
            drafts.append((token_id + ((state >> 20) % 5 == 0)) % VOCAB_SIZE)
            state = fold(state, drafts[-1])
        assert part.drafts == [DRAFTED] * len(drafts), "drafts of two sources"
        known = part.token_ids[: len(part.token_ids) - len(drafts)]
        return structs.replace(part, token_ids=[*known, *drafts])

    def _read_prefix(self, row: Row, start: int, length: int) -> int:
        """State at the end of the row's first `length` tokens, after comparing all that those from `start` on see with
        the truth."""
        states = states_of(row.token_ids[:length])
        for group, window in enumerate(self.windows):
            first = max(start - window + 1, 0) if window else 0
            found = [self.memory[row.slot(position, self.block_size, group)] for position in range(first, length)]
            assert found == states[first:], f"the KV memory of row {row.new.row} does not hold its tokens"
        return states[-1] if states else 0

    def _write(self, row: Row, start: int, token_ids: list[int], state: int) -> None:
        for position, token_id in enumerate(token_ids, start):
            state = fold(state, token_id)
            for group in range(len(self.windows)):
                self.memory[row.slot(position, self.block_size, group)] = state

    def _tensors(self, scheduled: SchedulerOutput) -> dict[int, RowTensors]:
        """Of each output that a row asks for, the tokens that it is of."""
        found: dict[int, RowTensors] = {}
        for part in scheduled.rows:
            row = self.rows[part.row]
            of_prompt = [name for name in row.new.outputs if name.startswith(("prompt_", "context_"))]
            of_samples = [name for name in row.new.outputs if name not in (LOG_PROBS, *of_prompt)]
            tokens = row.token_ids[part.start : min(part.start + part.num_tokens, row.new.num_prompt_tokens)]
            sampled = row.sampled if part.num_sampled else []
            if (of_prompt and tokens) or (of_samples and sampled):
                found[part.row] = RowTensors(
                    prompt_start=part.start,
                    num_prompt_tokens=len(tokens) if of_prompt else 0,
                    prompt={name: _as_array(tokens) for name in of_prompt if tokens},
                    generated=self._candidates(row)
                    if row.is_beam
                    else {name: _as_array(sampled) for name in of_samples if sampled},
                )
        return found

    def _candidates(self, row: Row) -> dict[str, Array]:
        assert row.num_computed is not None
        state = self.memory[row.slot(row.num_computed - 1, self.block_size)]
        new = row.new
        is_early = len(row.token_ids) - new.num_prompt_tokens < new.sampling_config.min_tokens
        found = candidates(state, new.num_log_probs, new.end_ids if is_early else [])
        names = top_names(BEAM_LOG_PROBS)
        return {
            names[0]: np.array([found.token_ids], dtype=np.int32),
            names[1]: np.array([found.log_probs], dtype=np.float32),
        }

    def _sample(self, scheduled: SchedulerOutput) -> StepOutput:
        token_ids: list[list[int]] = []
        errors: dict[int, str] = {}
        guesses: dict[int, list[int]] = {}
        parts = [part for part in scheduled.rows if part.num_sampled]
        rows = [self.rows[part.row] for part in parts]
        for part, row in zip(parts, rows, strict=True):
            behind = self._sample_row(part, row)
            if behind:
                guesses[part.row] = behind
            error = self._row_error(row)
            if error is not None:
                errors[row.new.row] = error
            token_ids.append([] if error is not None else row.sampled)
        log_probs = [[log_prob_of(t) for t in tokens] for tokens in token_ids]
        wanted = any(LOG_PROBS in row.new.outputs for row in rows)
        assert [row.new.row for row in rows] == scheduled.sampling_rows
        return StepOutput(token_ids=token_ids, log_probs=log_probs if wanted else None, guesses=guesses, errors=errors)

    def _sample_row(self, part: RowWork, row: Row) -> list[int]:
        """Sample after each of its last tokens; they become the row's until one is not what was guessed. Returns what
        was sampled behind that."""
        row.sampled, end = [], part.start + part.num_tokens
        first, sampled = end - part.num_sampled, []
        for place in range(first, end):
            state = self.memory[row.slot(place, self.block_size)]
            token_id = next_token(state, row.new.sampling_config.seed)
            token_id = self._weigh(part, row, place, state, token_id)
            if place + 1 - row.new.num_prompt_tokens < row.new.sampling_config.min_tokens:
                token_id = mask_end(token_id, row.new.end_ids)
            sampled.append(token_id)
        num_right = 1
        while num_right < len(sampled) and sampled[num_right - 1] == row.token_ids[first + num_right]:
            num_right += 1
        row.sampled = sampled[:num_right]
        if not row.is_beam:
            row.token_ids[first + 1 :] = row.sampled
            row.num_computed = first + len(row.sampled)
            row.num_seen = min(row.num_seen, row.num_computed)
        return sampled[num_right:]

    @staticmethod
    def _weigh(part: RowWork, row: Row, place: int, state: int, token_id: int) -> int:
        """The token that the row's weighed drafts leave at the position behind `place`."""
        drafts = [] if row.new.weighed_drafts is None else row.new.weighed_drafts.tokens
        output = row.token_ids[row.new.num_prompt_tokens : place + 1]
        is_followed = len(output) < len(drafts) and output == drafts[: len(output)]
        first = part.start + part.num_tokens - part.num_sampled
        if place == first:
            assert part.draft_index == (len(output) if is_followed else NO_DRAFT), "the wrong draft is weighed"
        return weigh(state, drafts[len(output)], token_id) if is_followed and part.draft_index != NO_DRAFT else token_id
