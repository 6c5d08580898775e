"""How the rows of one step pick their tokens. What no row of the step asks for is None and costs nothing.

Legend: S rows that sample, X restrictions, L longest beginning of a bad word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from inflight.runtime.repeated_ngrams import RepeatedNgrams
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
    WANTS_LOG_PROBS,
    RowTable,
)
from inflight.runtime.staging import Array, Staging
from inflight.scheduler_output import NewSequence

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNeeds:
    """What the host knows of a step's sampling: which parts of it are needed by any row."""

    is_random: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    top_p_decays: bool
    is_penalised: bool
    is_biased: bool
    repeats_no_ngram: bool
    log_probs: bool


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
    """On the device."""

    rows_S: Tensor
    """int64, persistent rows; padding names the row that nobody holds."""
    lengths_S: Tensor
    """int64, tokens of the row so far: the position of the token that is sampled."""
    needs: SamplingNeeds
    restrictions: Restrictions | None
    ngrams: RepeatedNgrams | None


def find_needs(table: RowTable, rows: Array) -> SamplingNeeds:
    """`rows` (S,), those that sample."""
    needs = int(np.bitwise_or.reduce(table.needs[rows]))
    return SamplingNeeds(
        is_random=bool(needs & RANDOM),
        any_top_k=bool(needs & TOP_K),
        any_top_p=bool(needs & TOP_P),
        any_min_p=bool(needs & MIN_P),
        top_p_decays=bool(needs & TOP_P_DECAYS),
        is_penalised=bool(needs & PENALISED),
        is_biased=bool(needs & BIASED),
        repeats_no_ngram=bool(needs & NO_REPEATED_NGRAM),
        log_probs=bool(needs & WANTS_LOG_PROBS),
    )


def stage_restrictions(staging: Staging, table: RowTable, rows: Array, lengths: Array, vocab_size: int) -> None:
    """Add what the sampling `rows` (S,) must not take at their `lengths` (S,) to a step's staged arrays."""
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
    """What `stage_restrictions` staged, now on the device, with the rows as the device knows them."""
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


def _forbidden(sequence: NewSequence, length: int) -> list[list[int]]:
    """Token sequences that must not be completed by the token at position `length`."""
    if length - sequence.num_prompt_tokens < sequence.sampling_config.min_tokens:
        return [*sequence.bad_words, *([end_id] for end_id in sequence.end_ids)]
    return sequence.bad_words
