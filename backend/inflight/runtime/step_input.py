"""The host's half of a step's preparation: turns a SchedulerOutput into arrays of numbers. Knows no network.

Rows are put into batch order, see StepBatch. The slots of tokens in the cache are computed on the device, see
BatchLayout.

Legend: T tokens of the step, N places of one token and P longer rows, B = N + P, S tokens that sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import structs

from inflight.models.adapter_places import Matrices
from inflight.runtime.adapters.adapter_store import AdapterStore
from inflight.runtime.draft_passes import (
    DraftPasses,
    drafted_works,
    first_works,
    later_rows,
    stage_passes,
    stage_states,
)
from inflight.runtime.drafts import (
    LAST_SAMPLED,
    find_drafts,
    number_drafts,
    stage_counted,
    stage_drafts,
    stage_lengths,
    stage_rejected,
)
from inflight.runtime.prompt_embeddings import stage_embeddings
from inflight.runtime.repeated_ngrams import stage_ngrams
from inflight.runtime.row_table import HAS_ADAPTER, IS_PAIR, PENALISED, WANTS_TENSORS, WEIGHS_DRAFTS, RowTable
from inflight.runtime.sampling_input import SamplingNeeds, find_needs, stage_restrictions, stage_typical
from inflight.runtime.staging import Array, Staging
from inflight.runtime.step_batch import StepBatch
from inflight.runtime.step_sizes import StepSizes
from inflight.runtime.step_tensors import NO_PLAN, TensorPlan, plan_tensors, served_outputs
from inflight.runtime.weighed_drafts import stage_weighed
from inflight.scheduler_output import NO_SLOT, Arrival, Export, NewSequence, RowWork, SchedulerOutput

NUMBERS_OF_CHANGES = 64
"""Numbers of 64 bits for each row of the batch, beside those that every step has. A new sequence takes twelve, and one
for each block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """Everything that the device's half of a step needs. N and S include padding. What has a default is missing in the
    first pass of a draft model."""

    new_sequences: list[NewSequence] = field(default_factory=list)
    scrubbed_block_ids: list[int] = field(default_factory=list)
    """Blocks in which NaN and infinity are replaced by 0 before the step."""
    offloads: list[tuple[int, int]] = field(default_factory=list)
    """This and the next as in SchedulerOutput."""
    onboards: list[tuple[int, int]] = field(default_factory=list)
    state_offloads: list[tuple[int, int]] = field(default_factory=list)
    """This and the next as in SchedulerOutput."""
    state_onboards: list[tuple[int, int]] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    """This and the next as in SchedulerOutput."""
    exports: list[Export] = field(default_factory=list)
    scrubbed_copies: list[int] = field(default_factory=list)
    """Blocks in which they are replaced when all blocks are copied."""
    adapter_loads: list[tuple[int, Mapping[str, Matrices]]] = field(default_factory=list)
    """(slot, this rank's part of the adapter), put there before the step."""
    arrays: dict[str, Array] = field(default_factory=dict)
    """What the device is told, by name. These come first, in this order, int64, unless a step does not need one:

    rows            (B) row of each place in the batch
    counts          (B) its number of tokens, up to the one in this place; 0 for padding
    token_ids       (T) LAST_SAMPLED where the host does not know the id, smaller numbers for drafts that the draft
                    model makes (see `number_drafts`); missing if it knows none and steps are not padded
    token_offsets   (T) index of each token in its row; missing if all are 0 and steps are not padded
    token_places    (T) place in the batch of each token's row; missing, as the next, without longer rows
    prefill_starts  (P + 1) int32, offset of each longer row's tokens, counted from the first longer row
    sampled_tokens  (S) indices of those of the T tokens that sample; missing, as the next, if all of them do
    sampling_rows   (S) the rows that sample
    adapters        (T) int32, slot of each token's adapter; missing if no token has one
    token_types     (T) 1 for the tokens of the second text of a pair, else 0; missing if all are 0
    sequence_starts int32 (one more than there are), where each sequence's tokens start; this and the next two are for
                    networks that keep states of sequences, or attend in both directions; missing if each has one token
    sequence_slots  the slot of each sequence; missing if they are `rows`
    kept_states     (T) int32, slot for the state behind each token, see RowWork.kept_states; missing without one

    Then what only some steps have: changes of rows, block copies, restrictions of sampling.
    """
    num_decodes: int
    num_prefills: int
    num_tokens: int
    is_padded: bool
    """Whether rows of one token may be padding."""
    max_prefill_len: int
    sampling_rows: list[int]
    """The rows that sample, without padding, in batch order; one that verifies drafts as often as it samples."""
    answer_order: list[int] | None = None
    """Indices into `sampling_rows` in the order of the SchedulerOutput's rows; None = the same order."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """Row -> those that it verifies, numbers of them until the step is collected if the draft model makes them."""
    drafting: dict[int, NewSequence] = field(default_factory=dict)
    """Whose they are, by row."""
    needs: SamplingNeeds | None
    """None = no row samples."""
    ngram_extent: tuple[int, int] = (0, 0)
    """See stage_ngrams."""
    tensor_plan: TensorPlan = NO_PLAN
    draft_passes: DraftPasses | None = None
    """What the draft model computes first."""


class StepPreparation:
    """Makes StepInputs, one after the other, and keeps the RowTable up to date."""

    def __init__(
        self,
        table: RowTable,
        *,
        vocab_size: int,
        sizes: StepSizes,
        model_outputs: Iterable[str] = (),
        adapters: AdapterStore | None = None,
        num_adapter_slots: int = 0,
        has_draft_model: bool = False,
        num_slots: int | None = None,
        draft_keeps_states: bool = False,
        has_sequences: bool = False,
        has_token_types: bool = False,
    ) -> None:
        """`model_outputs`: names of the tensors inside the network that rows may ask for. `num_slots`: for states of
        sequences; None = no layer keeps one. `draft_keeps_states`: whether the draft model's do. `has_sequences`:
        layers must know whose tokens a step has, also if they keep no states. `has_token_types`: see RequestLimits."""
        self._table = table
        self._vocab_size = vocab_size
        self._sizes = sizes
        self._served_outputs = served_outputs(model_outputs)
        self._rejected: dict[int, list[int]] = {}  # row -> tokens that its counts hold, although it does not have them
        self._uncertain_rows: set[int] = set()  # those whose length the device does not know: they have verified drafts
        self._adapters = adapters
        self._num_adapter_slots = num_adapter_slots
        self._has_draft_model = has_draft_model
        self._num_slots = num_slots
        self._draft_keeps_states = draft_keeps_states
        self._has_token_types = has_token_types
        self._has_sequences = has_sequences or num_slots is not None

    def input_bytes(self, max_num_tokens: int) -> int:
        """Bytes for the arrays of a step of up to `max_num_tokens` tokens, unless it changes very much."""
        # A step may have max_num_tokens tokens in longer rows in addition to a full batch of padded single ones.
        num_rows = self._table.num_rows + 1
        of_batch = 7 * num_rows + 5 * (num_rows + max_num_tokens)
        return 8 * (of_batch + num_rows * NUMBERS_OF_CHANGES)

    def prepare(self, scheduled: SchedulerOutput, scrubbed_block_ids: list[int]) -> StepInput:
        """Raises ValueError, and changes nothing, if the step asks for something that is not supported."""
        self._refuse_unserved(scheduled)
        adapter_loads = self._find_adapters(scheduled)
        drafted = self._find_drafted(scheduled)
        if drafted:
            width = self._sizes.padded(len(drafted))
            rows_by_draft_model = [work.row for work in drafted]
            scheduled = structs.replace(scheduled, rows=number_drafts(scheduled.rows, rows_by_draft_model, width))
        drafts = find_drafts(scheduled.rows, self._table.num_rows)
        batch = StepBatch(scheduled.rows, self._sizes, verifies=bool(drafts))
        changes = Staging()
        self._table.update(scheduled, changes)
        row_needs = int(np.bitwise_or.reduce(self._table.needs[batch.rows]))
        staging = Staging()
        batch.stage(staging, padding_row=self._table.num_rows)
        if row_needs & HAS_ADAPTER:
            staging.add("adapters", batch.of_tokens(self._table.adapters[batch.rows], padding=NO_SLOT))
        if row_needs & IS_PAIR and self._has_token_types:
            staging.add("token_types", self._token_types(batch))
        if self._has_sequences:
            batch.stage_sequences(staging, padding_row=self._table.num_rows)
        staging.arrays |= changes.arrays
        if scheduled.block_copies:
            sources, destinations = zip(*scheduled.block_copies, strict=True)
            staging.add("copied_from", np.array(sources, dtype=np.int64))
            staging.add("copied_to", np.array(destinations, dtype=np.int64))
        if scheduled.state_copies:
            states_from, states_to = zip(*scheduled.state_copies, strict=True)
            staging.add("states_from", np.array(states_from, dtype=np.int64))
            staging.add("states_to", np.array(states_to, dtype=np.int64))
        draft_passes = self._plan_passes(scheduled.rows, drafted, staging) if self._has_draft_model else None
        if self._uncertain_rows:
            stage_lengths(staging, scheduled.rows, self._uncertain_rows)
        if self._rejected:
            stage_rejected(staging, scheduled, self._rejected)
        if drafts:
            stage_counted(staging, self._table, batch.sampling_rows, drafts)
            stage_drafts(staging, self._table, scheduled.rows)
            self._uncertain_rows.update(drafts)
        needs, ngram_extent = None, (0, 0)
        if len(batch.sampling_rows):
            rows, lengths = batch.sampling_rows, batch.sampling_lengths
            needs = find_needs(self._table, rows)
            if needs.any_typical_p:
                stage_typical(staging, self._table, rows)
            if needs.is_restricted:
                stage_restrictions(staging, self._table, rows, lengths, self._vocab_size)
            if needs.repeats_no_ngram:
                ngram_extent = stage_ngrams(staging, self._table, rows, lengths)
        tensor_plan = NO_PLAN
        if row_needs & WEIGHS_DRAFTS:
            stage_weighed(staging, self._table, scheduled.rows, batch.sampling_rows, self._vocab_size)
        if row_needs & WANTS_TENSORS:
            tensor_plan = plan_tensors(staging, self._table, batch.works, batch.first_tokens())
        if self._table.embedding_tables and "token_ids" in staging.arrays:
            token_ids = staging.arrays["token_ids"]
            stage_embeddings(staging, self._table, batch.works, batch.first_tokens(), token_ids, self._vocab_size)
        return _describe(
            batch,
            staging,
            new_sequences=scheduled.new_sequences,
            adapter_loads=adapter_loads,
            scrubbed_block_ids=scrubbed_block_ids,
            offloads=scheduled.offloads,
            onboards=scheduled.onboards,
            state_offloads=scheduled.state_offloads,
            state_onboards=scheduled.state_onboards,
            arrivals=scheduled.arrivals,
            exports=scheduled.exports,
            scrubbed_copies=scheduled.scrubbed_block_ids,
            answer_order=batch.answer_order(),
            drafts=drafts,
            drafting={row: sequence for row in drafts if (sequence := self._table.sequences[row]) is not None},
            needs=needs,
            ngram_extent=ngram_extent,
            tensor_plan=tensor_plan,
            draft_passes=draft_passes,
        )

    def _token_types(self, batch: StepBatch) -> Array:
        types = np.zeros(batch.num_tokens, dtype=np.int64)
        for work, first in zip(batch.works, batch.first_tokens().tolist(), strict=True):
            sequence = self._table.sequences[work.row]
            if sequence is not None and sequence.second_text_start:
                second = max(sequence.second_text_start - work.start, 0)
                types[first + second : first + work.num_tokens] = 1
        return types

    def _find_drafted(self, scheduled: SchedulerOutput) -> list[RowWork]:
        drafted = drafted_works(scheduled.rows)
        if drafted and not self._has_draft_model:
            raise ValueError(f"there is no draft model, but row {drafted[0].row} asks for drafts of it")
        return drafted

    def _plan_passes(self, works: list[RowWork], drafted: list[RowWork], staging: Staging) -> DraftPasses | None:
        """What the draft model computes in a step of these works; None = nothing."""
        if self._draft_keeps_states:
            stage_states(staging, works, drafted, self._sizes)
        first = first_works(works, drafted)
        if not first:
            return None
        batch = StepBatch(first, self._sizes)
        rows = batch.sampling_rows
        stage_passes(staging, batch.rows, batch.seq_lens - batch.counts, rows, drafted, self._sizes)
        own = Staging()
        batch.stage(own, padding_row=self._table.num_rows)
        if self._draft_keeps_states:
            batch.stage_sequences(own, padding_row=self._table.num_rows)
        if "token_ids" in own.arrays:
            # Ids beyond the vocabulary, of embeddings that a prompt brings, mean nothing to it.
            own.add("token_ids", np.minimum(own.arrays["token_ids"], self._vocab_size - 1))
        needs = replace(find_needs(self._table, rows), log_probs=False) if len(rows) else None
        return DraftPasses(first=_describe(batch, own, needs=needs), num_rows=later_rows(drafted, self._sizes))

    def note_rejected(self, sequence: NewSequence, token_ids: list[int]) -> None:
        """The sequence has sampled these behind its accepted drafts. Another may have its row by now."""
        row = sequence.row
        if self._table.sequences[row] is sequence and self._table.needs[row] & PENALISED and token_ids:
            self._rejected[row] = token_ids

    def _refuse_unserved(self, scheduled: SchedulerOutput) -> None:
        if self._num_slots is None and (scheduled.state_copies or any(work.kept_states for work in scheduled.rows)):
            raise ValueError("no layer keeps a state of a sequence, but the step copies or keeps some")
        for new in scheduled.new_sequences:
            unknown = set(new.outputs) - self._served_outputs
            if unknown:
                raise ValueError(f"outputs {sorted(unknown)} are not served, only {sorted(self._served_outputs)}")
            if not NO_SLOT <= new.adapter_slot < self._num_adapter_slots:
                served = f"{self._num_adapter_slots} adapters are served"
                raise ValueError(f"{served}, but row {new.row} names slot {new.adapter_slot}")

    def _find_adapters(self, scheduled: SchedulerOutput) -> list[tuple[int, Mapping[str, Matrices]]]:
        """What `scheduled` puts into slots. Looked up now: the store may change before the step runs."""
        if not scheduled.adapter_loads:
            return []
        if self._adapters is None or any(
            not 0 <= slot < self._num_adapter_slots for slot, _ in scheduled.adapter_loads
        ):
            raise ValueError(f"{self._num_adapter_slots} adapters are served, but a step fills another slot")
        return [(slot, self._adapters.find(uid)) for slot, uid in scheduled.adapter_loads]


def _describe(batch: StepBatch, staging: Staging, **others: Any) -> StepInput:
    """`others`: the fields that do not follow from the batch."""
    return StepInput(
        arrays=staging.arrays,
        num_decodes=batch.num_decodes,
        num_prefills=batch.num_prefills,
        num_tokens=batch.num_tokens,
        is_padded=batch.is_padded,
        max_prefill_len=batch.max_prefill_len,
        sampling_rows=batch.sampling_rows.tolist(),
        **others,
    )


def padding_step(num_rows: int, padding_row: int, *, has_adapters: bool) -> StepInput:
    """A step of so many decodes that are all padding: it changes nothing."""
    numbers = {"rows": padding_row, "counts": 0, "token_ids": LAST_SAMPLED, "token_offsets": 0}
    arrays = {name: np.full(num_rows, number, dtype=np.int64) for name, number in numbers.items()}
    if has_adapters:
        arrays["adapters"] = np.full(num_rows, NO_SLOT, dtype=np.int32)
    return StepInput(
        arrays=arrays,
        num_decodes=num_rows,
        num_prefills=0,
        num_tokens=num_rows,
        is_padded=True,
        max_prefill_len=0,
        sampling_rows=[],
        needs=None,
    )
