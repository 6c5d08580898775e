"""How the tokens of one step are sampled. What no row of the step asks for is None and costs nothing.

Legend: S rows that sample, X restrictions, L length of the longest bad word without its last token, its "beginning".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from inflight.runtime.repeated_ngrams import RepeatedNgrams, find_ngrams
from inflight.runtime.row_table import (
    BIASED,
    MIN_P,
    NO_REPEATED_NGRAM,
    PENALISED,
    RANDOM,
    RESTRICTED,
    TOP_K,
    TOP_P,
    TOP_P_DECAYS,
    TYPICAL_P,
    WANTS_LOG_PROBS,
    RowTable,
)
from inflight.runtime.staging import Array, Staging
from inflight.runtime.weighed_drafts import WeighedDrafts, find_weighed
from inflight.scheduler_output import NewSequence

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNeeds:
    """The features of the sampler that at least one row of a step needs, as the host knows them."""

    is_random: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_typical_p: bool
    top_p_decays: bool
    is_penalised: bool
    is_biased: bool
    is_restricted: bool
    repeats_no_ngram: bool
    log_probs: bool

    @property
    def is_plain(self) -> bool:
        """Whether drawing a token from the logits, with or without filters, is all that the rows need."""
        changes_logits = self.is_penalised or self.is_biased or self.is_restricted or self.repeats_no_ngram
        return not (changes_logits or self.any_typical_p or self.top_p_decays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restrictions:
    """Tokens that rows must not sample: always (`beginnings_XL` is None), or if their history ends with a beginning."""

    places_X: Tensor
    """int64, index of (sampling row of the step, token) in a flattened (S, V)."""
    beginnings_XL: Tensor | None
    """int64, the tokens that must precede the token for it to be forbidden, padded with NO_TOKEN on the left."""
    rows_X: Tensor | None
    """int64, the row of each restriction in RowState."""
    lengths_X: Tensor | None
    """int64, number of tokens of that row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInput:
    """The input of the Sampler; its tensors are on the device."""

    rows_S: Tensor
    """int64, rows of RowState; RowState.padding_row for padding."""
    lengths_S: Tensor
    """int64, tokens of the row so far: the position of the token that is sampled."""
    needs: SamplingNeeds
    restrictions: Restrictions | None
    ngrams: RepeatedNgrams | None
    counted: tuple[Tensor, Tensor] | None = None
    """int64 each: indices among the S, and the drafts that count as output there besides those of RowState."""
    typical_K: Tensor | None = None
    """int64, which of the S rows have a typical_p."""
    weighed: WeighedDrafts | None = None

    @property
    def is_plain(self) -> bool:
        return self.needs.is_plain and self.weighed is None


def plain_needs(*, is_random: bool, is_filtered: bool, log_probs: bool) -> SamplingNeeds:
    """Of rows that are sampled greedily or at random, with all filters or without."""
    return SamplingNeeds(
        is_random=is_random,
        any_top_k=is_filtered,
        any_top_p=is_filtered,
        any_min_p=is_filtered,
        any_typical_p=False,
        top_p_decays=False,
        is_penalised=False,
        is_biased=False,
        is_restricted=False,
        repeats_no_ngram=False,
        log_probs=log_probs,
    )


def find_needs(table: RowTable, rows: Array) -> SamplingNeeds:
    """The needs of a step. `rows`: int64 (S,), the rows that sample."""
    return _of_bits(int(np.bitwise_or.reduce(table.needs[rows])))


@functools.cache
def _of_bits(needs: int) -> SamplingNeeds:
    return SamplingNeeds(
        is_random=bool(needs & RANDOM),
        any_top_k=bool(needs & TOP_K),
        any_top_p=bool(needs & TOP_P),
        any_min_p=bool(needs & MIN_P),
        any_typical_p=bool(needs & TYPICAL_P),
        top_p_decays=bool(needs & TOP_P_DECAYS),
        is_penalised=bool(needs & PENALISED),
        is_biased=bool(needs & BIASED),
        is_restricted=bool(needs & RESTRICTED),
        repeats_no_ngram=bool(needs & NO_REPEATED_NGRAM),
        log_probs=bool(needs & WANTS_LOG_PROBS),
    )


def find_sampling(
    needs: SamplingNeeds,
    arrays: dict[str, Tensor],
    rows_S: Tensor,
    lengths_S: Tensor,
    ngram_extent: tuple[int, int] = (0, 0),
) -> SamplingInput:
    """How a step samples whose `arrays` are on the device. `ngram_extent`: see `stage_ngrams`."""
    return SamplingInput(
        rows_S=rows_S,
        lengths_S=lengths_S,
        needs=needs,
        restrictions=find_restrictions(arrays, rows_S, lengths_S),
        ngrams=find_ngrams(arrays, ngram_extent, rows_S, lengths_S),
        counted=find_counted(arrays),
        typical_K=arrays.get("typical_owners"),
        weighed=find_weighed(arrays),
    )


def stage_typical(staging: Staging, table: RowTable, rows: Array) -> None:
    """Add those of the sampling `rows` (S,) that have a typical_p to the staged arrays."""
    staging.add("typical_owners", np.flatnonzero(table.needs[rows] & TYPICAL_P))


def stage_restrictions(staging: Staging, table: RowTable, rows: Array, lengths: Array, vocab_size: int) -> None:
    """Add the tokens that the sampling `rows` (S,) must not sample at position `lengths` (S,) to the staged arrays."""
    restricted = np.flatnonzero(table.needs[rows] & RESTRICTED)
    places: list[int] = []
    beginnings: list[list[int]] = []
    owners: list[int] = []
    for index in restricted.tolist():
        sequence = table.sequences[rows[index]]
        assert sequence is not None
        for *beginning, last in _forbidden(sequence, int(lengths[index])):
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
        staging.add("restricted_owners", np.array(owners, dtype=np.int64))


def find_restrictions(arrays: dict[str, Tensor], rows_S: Tensor, lengths_S: Tensor) -> Restrictions | None:
    """The restrictions that `stage_restrictions` has staged, as tensors on the device; None if there are none."""
    places_X = arrays.get("restricted_places")
    if places_X is None:
        return None
    beginnings_XL, owners_X = arrays.get("restricted_beginnings"), arrays.get("restricted_owners")
    return Restrictions(
        places_X=places_X,
        beginnings_XL=beginnings_XL,
        rows_X=None if owners_X is None else rows_S.index_select(0, owners_X),
        lengths_X=None if owners_X is None else lengths_S.index_select(0, owners_X),
    )


def find_counted(arrays: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Drafts that count as output, see `drafts.stage_counted`."""
    places = arrays.get("counted_places")
    return None if places is None else (places, arrays["counted_tokens"])


def _forbidden(sequence: NewSequence, length: int) -> list[list[int]]:
    """Token sequences that must not be completed by the token at position `length`."""
    if length - sequence.num_prompt_tokens < sequence.sampling_config.min_tokens:
        return [*sequence.bad_words, *([end_id] for end_id in sequence.end_ids)]
    return sequence.bad_words
