"""How the rows of one step pick their tokens, as tensors. What no row of the step asks for is None and costs nothing.

Legend: S rows that sample, F float fields, X restrictions, L longest beginning of a bad word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from inflight.runtime.row_table import FLOAT_FIELDS, RowTable
from inflight.runtime.staging import Array, Staging
from inflight.scheduler_output import NewSequence

NO_TOKEN = -1
_TOP_P, _MIN_P = FLOAT_FIELDS.index("top_p"), FLOAT_FIELDS.index("min_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restrictions:
    """Tokens that rows must not take: always (`beginnings` is None), or where their history ends with a beginning."""

    places_X: Tensor
    """int64, index of (row of the step, token) in a flat (S, V)."""
    beginnings_XL: Tensor | None
    """int64, the tokens that must come before, filled with NO_TOKEN from the left."""
    rows_X: Tensor | None
    """int64, persistent row of each restriction."""
    lengths_X: Tensor | None
    """int64, tokens that its row holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInput:
    rows_S: Tensor
    """int64, persistent rows."""
    lengths_S: Tensor
    """int64, tokens of the row so far: the position of the token that is sampled."""
    floats_FS: Tensor | None
    """float32, see FLOAT_FIELDS; None = all rows greedy, none penalised."""
    top_k_S: Tensor | None
    seeds_S: Tensor | None
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool
    log_probs: bool
    restrictions: Restrictions | None


class SamplingPlan:
    """Decides on the host what the step's sampling needs, puts that into a Staging, takes the tensors out again."""

    def __init__(self, rows: Array, lengths: Array, table: RowTable) -> None:
        self._rows = rows
        self._lengths = lengths
        self._table = table
        self._any_random = bool(table.is_random[rows].any())
        self._any_penalty = bool(table.is_penalised[rows].any())

    def stage(self, staging: Staging, vocab_size: int) -> None:
        rows, table = self._rows, self._table
        if not len(rows):
            return
        staging.add("sampling_rows", rows)
        staging.add("sampling_lengths", self._lengths)
        if self._any_random or self._any_penalty:
            staging.add("floats", table.floats[:, rows])
            staging.add("top_k", table.top_k[rows])
            staging.add("seeds", table.seeds[rows])
        restricted = np.flatnonzero(table.is_restricted[rows])
        if len(restricted):
            self._stage_restrictions(staging, vocab_size, restricted.tolist())

    def _stage_restrictions(self, staging: Staging, vocab_size: int, restricted: list[int]) -> None:
        places: list[int] = []
        beginnings: list[list[int]] = []
        owners: list[int] = []
        for index in restricted:
            sequence = self._table.sequences[self._rows[index]]
            assert sequence is not None
            for *beginning, last in _forbidden(sequence, int(self._lengths[index])):
                places.append(index * vocab_size + last)
                beginnings.append(beginning)
                owners.append(index)
        if not places:
            return
        staging.add("restricted_places", np.array(places, dtype=np.int64))
        longest = max(map(len, beginnings))
        if longest:
            padded = [[NO_TOKEN] * (longest - len(beginning)) + beginning for beginning in beginnings]
            staging.add("restricted_beginnings", np.array(padded, dtype=np.int64))
            staging.add("restricted_rows", self._rows[owners])
            staging.add("restricted_lengths", self._lengths[owners])

    def finish(self, arrays: dict[str, Tensor]) -> SamplingInput | None:
        """The staged arrays, now on the device; None if no row samples."""
        rows, table = self._rows, self._table
        if not len(rows):
            return None
        places = arrays.get("restricted_places")
        restrictions = None
        if places is not None:
            restrictions = Restrictions(
                places_X=places,
                beginnings_XL=arrays.get("restricted_beginnings"),
                rows_X=arrays.get("restricted_rows"),
                lengths_X=arrays.get("restricted_lengths"),
            )
        return SamplingInput(
            rows_S=arrays["sampling_rows"],
            lengths_S=arrays["sampling_lengths"],
            floats_FS=arrays.get("floats"),
            top_k_S=arrays.get("top_k"),
            seeds_S=arrays.get("seeds"),
            all_greedy=not self._any_random,
            any_top_k=self._any_random and bool(table.top_k[rows].any()),
            any_top_p=self._any_random and bool((table.floats[_TOP_P, rows] < 1).any()),
            any_min_p=self._any_random and bool(table.floats[_MIN_P, rows].any()),
            any_penalty=self._any_penalty,
            log_probs=bool(table.wants_log_probs[rows].any()),
            restrictions=restrictions,
        )


def _forbidden(sequence: NewSequence, length: int) -> list[list[int]]:
    """Token sequences that must not be completed by the token at position `length`."""
    if length - sequence.num_prompt_tokens < sequence.sampling_config.min_tokens:
        return [*sequence.bad_words, *([end_id] for end_id in sequence.end_ids)]
    return sequence.bad_words
