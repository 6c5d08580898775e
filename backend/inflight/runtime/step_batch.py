"""The rows of one step in batch order: first those that bring a single token, which attention treats as decodes even if
it is a prompt's token, then the longer ones, the prefills.

A row that verifies drafts takes a place among the former for each of its tokens, see `inflight.runtime.drafts`. Knows
numbers of tokens and lengths, not what rows ask for.
"""

from __future__ import annotations

import numpy as np

from inflight.runtime.drafts import LAST_SAMPLED, spread
from inflight.runtime.staging import Array, Staging
from inflight.runtime.step_sizes import StepSizes
from inflight.scheduler_output import RowWork


class StepBatch:
    """Of each row `works`, `rows` (its number), `counts` (of its tokens) and `seq_lens` (its tokens up to the last of
    them); of those that sample `sampling_rows` and `sampling_lengths`. Arrays are int64 and hold no padding;
    `num_decodes` and `num_tokens` count it."""

    def __init__(self, rows: list[RowWork], sizes: StepSizes, *, verifies: bool = False) -> None:
        """`rows`: as the scheduler orders them. `verifies`: whether they bring drafts."""
        offsets: Array | None = None
        if verifies:
            rows, offsets = spread(rows)
        columns = [
            _column([work.num_tokens for work in rows]),
            _column([work.row for work in rows]),
            _column([work.start for work in rows]),
            _column([work.num_sampled for work in rows]),
        ]
        # count_nonzero takes a third of the time of sum, any and all.
        is_long = columns[0] > 1
        self.num_prefills = int(np.count_nonzero(is_long))
        self.num_singles = len(rows) - self.num_prefills
        self._order: Array | None = None
        if self.num_prefills and is_long[: self.num_singles].any():
            self._order = np.argsort(is_long, kind="stable")
            columns = [column[self._order] for column in columns]
            rows = [rows[index] for index in self._order.tolist()]
            if offsets is not None:
                offsets = offsets[self._order]
        self.works = rows
        self.counts, self.rows, starts, num_sampled = columns
        self.seq_lens = starts + self.counts
        self._drafts_before = offsets
        self._samples = num_sampled > 0
        self._all_sample = np.count_nonzero(num_sampled) == len(rows)
        self.sampling_rows, self.sampling_lengths = self.rows, self.seq_lens
        if not self._all_sample:
            self.sampling_rows, self.sampling_lengths = self.rows[self._samples], self.seq_lens[self._samples]
        self.num_decodes = sizes.padded(self.num_singles)
        self._num_sampled = sizes.padded(len(self.sampling_rows))
        longer: list[int] = self.counts[self.num_singles :].tolist()
        self.num_tokens = self.num_decodes + sum(longer)
        self.max_prefill_len = max(longer, default=0)
        self.is_padded = sizes.pads and self.num_decodes > 0

    def answer_order(self) -> list[int] | None:
        """Indices into `sampling_rows` in the scheduler's order of rows; None = the same order."""
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

    def stage(self, staging: Staging, padding_row: int) -> None:
        """Add the arrays that describe the batch, see StepInput.arrays."""
        rows, counts = self._pad(self.rows, padding_row), self._pad(self.counts, 0)
        drafts_before = None if self._drafts_before is None else self._pad(self._drafts_before, 0)
        staging.add("rows", rows)
        staging.add("counts", counts if drafts_before is None else counts + drafts_before)
        # The launches of a padded step must not depend on what its rows bring.
        if self.num_prefills or self.is_padded or self._has_host_tokens():
            token_ids = _token_ids(self.works, self.num_tokens, self.num_singles, self.num_decodes)
            staging.add("token_ids", token_ids)
        if self.num_prefills or self.is_padded or drafts_before is not None:
            sizes = np.maximum(counts, 1)  # a padding row also has one token
            before = sizes - np.cumsum(sizes) + (0 if drafts_before is None else drafts_before)
            staging.add("token_offsets", np.arange(self.num_tokens) + np.repeat(before, sizes))
        if self.num_prefills:
            staging.add("token_places", np.repeat(np.arange(len(rows)), np.maximum(counts, 1)))
            starts = np.concatenate([_ZERO, np.cumsum(self.counts[self.num_singles :])])
            staging.add("prefill_starts", starts.astype(np.int32))
        if self.num_prefills or not self._all_sample:
            last_tokens = (self.first_tokens() + self.counts - 1)[self._samples]
            # Padding samples from the first token.
            missing = np.zeros(self._num_sampled - len(last_tokens), dtype=np.int64)
            staging.add("sampled_tokens", np.concatenate([last_tokens, missing]))
            staging.add("sampling_rows", np.concatenate([self.sampling_rows, missing + padding_row]))

    def stage_sequences(self, staging: Staging, padding_row: int) -> None:
        """Add what layers need that keep a state for each sequence, as far as the device does not know it."""
        if self.num_prefills or self._drafts_before is not None:
            sizes = np.maximum(self._pad(self.counts, 0), 1)
            ends = np.cumsum(sizes)
            first_places = np.ones(len(sizes), dtype=bool)
            if self._drafts_before is not None:
                # Drafts follow their row's token, each in a place of its own.
                first_places = self._pad(self._drafts_before, 0) == 0
                staging.add("sequence_slots", self._pad(self.rows, padding_row)[first_places])
            starts = np.concatenate([(ends - sizes)[first_places], ends[-1:]])
            staging.add("sequence_starts", starts.astype(np.int32))
        kept = [
            (first + index, slot)
            for work, first in zip(self.works, self.first_tokens().tolist(), strict=True)
            for index, slot in work.kept_states
        ]
        if kept:
            slots = np.full(self.num_tokens, -1, dtype=np.int32)
            places, kept_slots = zip(*kept, strict=True)
            slots[list(places)] = kept_slots
            staging.add("kept_states", slots)

    def _has_host_tokens(self) -> bool:
        return any(work.token_ids for work in self.works)

    def _pad(self, values: Array, filler: int) -> Array:
        """Insert padding between the rows of one token and the longer ones."""
        missing = self.num_decodes - self.num_singles
        if not missing:
            return values
        filling = np.full(missing, filler, dtype=np.int64)
        return np.concatenate([values[: self.num_singles], filling, values[self.num_singles :]])


_ZERO: Array = np.zeros(1, dtype=np.int64)


def _column(values: list[int]) -> Array:
    # A fifth of what np.array takes for a list of tuples: it need not find out what the list holds.
    return np.fromiter(values, dtype=np.int64, count=len(values))


def _token_ids(works: list[RowWork], num_tokens: int, num_singles: int, first_long: int) -> Array:
    """The token ids that the host knows, LAST_SAMPLED for the others; the longer rows begin at index `first_long`."""
    token_ids = np.full(num_tokens, LAST_SAMPLED, dtype=np.int64)
    for place, work in enumerate(works[:num_singles]):
        if work.token_ids:
            token_ids[place] = work.token_ids[0]
    end = first_long
    for work in works[num_singles:]:
        end += work.num_tokens
        if work.token_ids:
            token_ids[end - len(work.token_ids) : end] = work.token_ids
    return token_ids
