"""The host's half of a step's preparation: turns a SchedulerOutput into arrays of numbers. Knows no network.

Rows are put into batch order here: first those that bring a single token, which attention treats as decodes even if it
is a prompt's token, then the longer ones, the prefills. A row that verifies drafts takes a place among the former for
each of its tokens, see `inflight.runtime.drafts`. The slots of tokens in the cache are computed on the device, see
BatchLayout.

Legend: T tokens of the step, N places of one token and P longer rows, B = N + P, S tokens that sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from inflight.models.adapter_places import Matrices
from inflight.runtime.adapters.adapter_store import AdapterStore
from inflight.runtime.draft_passes import DraftPasses, drafted_works, first_works, later_rows, stage_passes
from inflight.runtime.drafts import (
    LAST_SAMPLED,
    find_drafts,
    number_drafts,
    spread,
    stage_counted,
    stage_drafts,
    stage_lengths,
    stage_rejected,
)
from inflight.runtime.prompt_embeddings import stage_embeddings
from inflight.runtime.repeated_ngrams import stage_ngrams
from inflight.runtime.row_table import HAS_ADAPTER, PENALISED, WANTS_TENSORS, WEIGHS_DRAFTS, RowTable
from inflight.runtime.sampling_input import SamplingNeeds, find_needs, stage_restrictions, stage_typical
from inflight.runtime.staging import Array, Staging, to_host_tensor
from inflight.runtime.step_sizes import StepSizes
from inflight.runtime.step_tensors import NO_PLAN, TensorPlan, plan_tensors, served_outputs
from inflight.runtime.weighed_drafts import stage_weighed
from inflight.scheduler_output import NO_SLOT, NewSequence, RowWork, SchedulerOutput


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
    arrivals: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)
    """This and the next as in SchedulerOutput."""
    exports: list[tuple[bytes, list[int]]] = field(default_factory=list)
    scrubbed_copies: list[int] = field(default_factory=list)
    """Blocks in which they are replaced when all blocks are copied."""
    adapter_loads: list[tuple[int, Mapping[str, Matrices]]] = field(default_factory=list)
    """(slot, this rank's part of the adapter), put there before the step."""
    staged: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that only some steps have, on the device: changes of rows, block copies, adapters, restrictions."""
    numbers: Tensor
    """int64, on the host: eight parts, one after the other. A part that a step does not need is empty.

    1. (B) row of each place in the batch
    2. (B) its number of tokens, up to the one in this place; 0 for padding
    3. (T) token ids, LAST_SAMPLED where the host does not know the id, smaller ones for drafts that the draft model
       makes (see `number_drafts`); empty if it knows none
    4. (T) place in the batch of each token's row; this and the next are empty if every row brings one token
    5. (T) index of each token in its row
    6. (P + 1) offset of each longer row's tokens, counted from the first longer row; empty if there is none
    7. (S) indices of those of the T tokens that sample; this and the next are empty if all of them do
    8. (S) the rows that sample
    """
    part_sizes: list[int]
    num_decodes: int
    num_prefills: int
    num_tokens: int
    is_padded: bool
    decode_blocks: int
    """Width of the decodes' block table: the blocks of the longest row that brings one token."""
    prefill_blocks: int
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
        block_size: int,
        vocab_size: int,
        sizes: StepSizes,
        device: torch.device,
        model_outputs: Iterable[str] = (),
        adapters: AdapterStore | None = None,
        num_adapter_slots: int = 0,
        has_draft_model: bool = False,
    ) -> None:
        """`model_outputs`: names of the tensors inside the network that rows may ask for."""
        self._table = table
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._sizes = sizes
        self._device = device
        self._served_outputs = served_outputs(model_outputs)
        self._rejected: dict[int, list[int]] = {}  # row -> tokens that its counts hold, although it does not have them
        self._uncertain_rows: set[int] = set()  # those whose length the device does not know: they have verified drafts
        self._adapters = adapters
        self._num_adapter_slots = num_adapter_slots
        self._has_draft_model = has_draft_model

    def capacity(self, max_num_tokens: int) -> int:
        """Upper bound of the length of StepInput.numbers for a step of up to `max_num_tokens` tokens."""
        num_rows = max(self._table.num_rows, *self._sizes.num_rows, 1)
        # A step may have max_num_tokens tokens in longer rows in addition to a full batch of padded single ones.
        return 7 * (num_rows + 1) + 3 * (num_rows + max_num_tokens)

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
        batch = _Batch(scheduled.rows, self._sizes, verifies=bool(drafts))
        staging = Staging(self._device)
        self._stage_changes(scheduled, staging)
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
            stage_restrictions(staging, self._table, rows, lengths, self._vocab_size)
            if needs.repeats_no_ngram:
                ngram_extent = stage_ngrams(staging, self._table, rows, lengths)
        tensor_plan = NO_PLAN
        row_needs = int(np.bitwise_or.reduce(self._table.needs[batch.rows]))
        if row_needs & HAS_ADAPTER:
            staging.add("adapters", batch.of_tokens(self._table.adapters[batch.rows], padding=NO_SLOT))
        if row_needs & WEIGHS_DRAFTS:
            stage_weighed(staging, self._table, scheduled.rows, batch.sampling_rows, self._vocab_size)
        if row_needs & WANTS_TENSORS:
            tensor_plan = plan_tensors(staging, self._table, batch.works, batch.first_tokens())
        parts = batch.parts(padding_row=self._table.num_rows)
        if self._table.embedding_tables:
            stage_embeddings(staging, self._table, batch.works, batch.first_tokens(), parts[2], self._vocab_size)
        return self._describe(
            batch,
            parts,
            new_sequences=scheduled.new_sequences,
            adapter_loads=adapter_loads,
            scrubbed_block_ids=scrubbed_block_ids,
            offloads=scheduled.offloads,
            onboards=scheduled.onboards,
            arrivals=scheduled.arrivals,
            exports=scheduled.exports,
            scrubbed_copies=scheduled.scrubbed_block_ids,
            staged=staging.send(),
            answer_order=batch.answer_order(),
            drafts=drafts,
            drafting={row: sequence for row in drafts if (sequence := self._table.sequences[row]) is not None},
            needs=needs,
            ngram_extent=ngram_extent,
            tensor_plan=tensor_plan,
            draft_passes=draft_passes,
        )

    def _describe(self, batch: _Batch, parts: list[Array], **others: Any) -> StepInput:
        """`others`: the fields that do not follow from the batch and its parts."""
        return StepInput(
            numbers=to_host_tensor(np.concatenate(parts), self._device),
            part_sizes=[len(part) for part in parts],
            num_decodes=batch.num_decodes,
            num_prefills=batch.num_prefills,
            num_tokens=batch.num_tokens,
            is_padded=batch.is_padded,
            decode_blocks=self._width(batch.seq_lens[: batch.num_singles]),
            prefill_blocks=self._width(batch.seq_lens[batch.num_singles :]),
            max_prefill_len=int(batch.counts[batch.num_singles :].max(initial=0)),
            sampling_rows=batch.sampling_rows.tolist(),
            **others,
        )

    def _find_drafted(self, scheduled: SchedulerOutput) -> list[RowWork]:
        drafted = drafted_works(scheduled.rows)
        if drafted and not self._has_draft_model:
            raise ValueError(f"there is no draft model, but row {drafted[0].row} asks for drafts of it")
        return drafted

    def _plan_passes(self, works: list[RowWork], drafted: list[RowWork], staging: Staging) -> DraftPasses | None:
        """What the draft model computes in a step of these works; None = nothing."""
        first = first_works(works, drafted)
        if not first:
            return None
        batch = _Batch(first, self._sizes)
        rows = batch.sampling_rows
        stage_passes(staging, batch.rows, batch.seq_lens - batch.counts, rows, drafted, self._sizes)
        parts = batch.parts(padding_row=self._table.num_rows)
        # Ids beyond the vocabulary, of embeddings that a prompt brings, mean nothing to it.
        parts[2] = np.minimum(parts[2], self._vocab_size - 1)
        needs = replace(find_needs(self._table, rows), log_probs=False) if len(rows) else None
        ends = np.array([work.start + len(work.drafts) for work in drafted], dtype=np.int64)
        return DraftPasses(
            first=self._describe(batch, parts, needs=needs),
            num_rows=later_rows(drafted, self._sizes),
            num_blocks=self._width(ends),
        )

    def note_rejected(self, sequence: NewSequence, token_ids: list[int]) -> None:
        """The sequence has sampled these behind its accepted drafts. Another may have its row by now."""
        row = sequence.row
        if self._table.sequences[row] is sequence and self._table.needs[row] & PENALISED and token_ids:
            self._rejected[row] = token_ids

    def _refuse_unserved(self, scheduled: SchedulerOutput) -> None:
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

    def _stage_changes(self, scheduled: SchedulerOutput, staging: Staging) -> None:
        self._table.update(scheduled, staging)
        if scheduled.block_copies:
            sources, destinations = zip(*scheduled.block_copies, strict=True)
            staging.add("copied_from", np.array(sources, dtype=np.int64))
            staging.add("copied_to", np.array(destinations, dtype=np.int64))

    def _width(self, seq_lens: Array) -> int:
        """Width of a block table: the blocks of the longest of these rows or, where steps are padded, the maximum."""
        if self._sizes.pads:
            return self._table.max_blocks
        return -(-int(seq_lens.max(initial=0)) // self._block_size)


class _Batch:
    """The rows of one step in batch order. Its arrays hold no padding."""

    def __init__(self, rows: list[RowWork], sizes: StepSizes, *, verifies: bool = False) -> None:
        """`verifies`: whether rows bring drafts."""
        offsets: Array | None = None
        if verifies:
            rows, offsets = spread(rows)
        numbers = [(work.num_tokens, work.row, work.start, work.num_sampled) for work in rows]
        columns = np.array(numbers, dtype=np.int64).reshape(-1, 4)
        is_long = columns[:, 0] > 1
        self.num_prefills = int(is_long.sum())
        self.num_singles = len(rows) - self.num_prefills
        self._order: Array | None = None
        if is_long[: self.num_singles].any():
            self._order = np.argsort(is_long, kind="stable")
            columns = columns[self._order]
            rows = [rows[index] for index in self._order]
            if offsets is not None:
                offsets = offsets[self._order]
        self.works = rows
        self.counts, self.rows, starts, num_sampled = columns.T
        self.seq_lens = starts + self.counts
        self._draft_offsets = offsets
        self._samples = num_sampled > 0
        self.sampling_rows, self.sampling_lengths = self.rows, self.seq_lens
        if not self._samples.all():
            self.sampling_rows, self.sampling_lengths = self.rows[self._samples], self.seq_lens[self._samples]
        self.num_decodes = sizes.padded(self.num_singles)
        self._num_sampled = sizes.padded(len(self.sampling_rows))
        self.num_tokens = self.num_decodes + int(self.counts[self.num_singles :].sum())
        self.is_padded = self.num_decodes > self.num_singles

    def answer_order(self) -> list[int] | None:
        if self._order is None:
            return None
        order: list[int] = np.argsort(self._order[self._samples]).tolist()
        return order

    def first_tokens(self) -> Array:
        """Where each row's tokens start among the step's, padding counted."""
        longer = self.counts[self.num_singles :]
        return np.concatenate([np.arange(self.num_singles), self.num_decodes + np.cumsum(longer) - longer])

    def of_tokens(self, of_rows: Array, *, padding: int) -> Array:
        """A value of each row, in batch order, repeated for each of its tokens; `padding` for padding."""
        sizes = np.maximum(self._pad(self.counts, 0), 1)  # a padding row also has one token
        values = of_rows
        if self.num_decodes > self.num_singles:
            filling = np.full(self.num_decodes - self.num_singles, padding, dtype=of_rows.dtype)
            values = np.concatenate([of_rows[: self.num_singles], filling, of_rows[self.num_singles :]])
        return np.repeat(values, sizes)

    def parts(self, padding_row: int) -> list[Array]:
        """See StepInput.numbers."""
        rows = self._pad(self.rows, padding_row)
        counts = self._pad(self.counts, 0)
        if not self.num_prefills and self._draft_offsets is None:
            token_ids = _token_ids(self.works, self.num_decodes) if self.works and self._has_host_tokens() else _EMPTY
            sampled = _EMPTY if self._samples.all() else self._sampled(np.arange(1, len(self.rows) + 1))
            return [rows, counts, token_ids, _EMPTY, _EMPTY, _EMPTY, sampled, self._sampling_rows(sampled, padding_row)]
        sizes = np.maximum(counts, 1)  # a padding row also has one token
        ends = np.cumsum(sizes)
        token_rows = np.repeat(np.arange(len(rows)), sizes)
        offsets = np.arange(self.num_tokens) - np.repeat(ends - sizes, sizes)
        if self._draft_offsets is not None:
            offsets[: self.num_singles] += self._draft_offsets[: self.num_singles]
            counts = counts.copy()
            counts[: self.num_singles] += self._draft_offsets[: self.num_singles]
        token_ids = _token_ids(self.works, self.num_tokens, self.num_singles, self.num_decodes)
        start_loc = _EMPTY
        if self.num_prefills:
            start_loc = np.concatenate([_ZERO, np.cumsum(self.counts[self.num_singles :])])
        real_ends = np.concatenate([ends[: self.num_singles], ends[self.num_decodes :]])
        sampled = self._sampled(real_ends)
        return [
            rows, counts, token_ids, token_rows, offsets, start_loc, sampled, self._sampling_rows(sampled, padding_row)
        ]  # fmt: skip

    def _has_host_tokens(self) -> bool:
        return any(work.token_ids for work in self.works)

    def _pad(self, values: Array, filler: int) -> Array:
        """Insert padding between the rows of one token and the longer ones."""
        missing = self.num_decodes - self.num_singles
        if not missing:
            return values
        filling = np.full(missing, filler, dtype=np.int64)
        return np.concatenate([values[: self.num_singles], filling, values[self.num_singles :]])

    def _sampled(self, ends: Array) -> Array:
        """Indices of the tokens that sample; padding samples from the first token."""
        sampled = ends[self._samples] - 1
        return np.concatenate([sampled, np.zeros(self._num_sampled - len(sampled), dtype=np.int64)])

    def _sampling_rows(self, sampled: Array, padding_row: int) -> Array:
        missing = len(sampled) - len(self.sampling_rows)
        if missing < 0:
            return _EMPTY
        return np.concatenate([self.sampling_rows, np.full(missing, padding_row, dtype=np.int64)])


_EMPTY: Array = np.empty(0, dtype=np.int64)
_ZERO: Array = np.zeros(1, dtype=np.int64)


def _token_ids(works: list[RowWork], num_tokens: int, num_singles: int | None = None, first_long: int = 0) -> Array:
    """The token ids that the host knows, LAST_SAMPLED for the others; the longer rows begin at index `first_long`."""
    token_ids = np.full(num_tokens, LAST_SAMPLED, dtype=np.int64)
    singles = works[:num_singles]
    for place, work in enumerate(singles):
        if work.token_ids:
            token_ids[place] = work.token_ids[0]
    end = first_long
    for work in works[len(singles) :]:
        end += work.num_tokens
        if work.token_ids:
            token_ids[end - len(work.token_ids) : end] = work.token_ids
    return token_ids
