"""Tokens that would repeat an n-gram of their row's text (`no_repeat_ngram_size`), found on the device.

The rule of transformers' NoRepeatNGramLogitsProcessor: with size n, a token is forbidden if it and the n - 1 tokens
before it have stood somewhere in prompt and output already. Legend: S rows that sample, K those of them with a size,
W places of the text that the step looks at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.runtime.row_table import NO_REPEATED_NGRAM, RowTable
from inflight.runtime.staging import Array, Staging


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedNgrams:
    """The rows of one step that must repeat no n-gram, on the device."""

    owners_K: Tensor
    """int64, index among the S rows."""
    rows_K: Tensor
    """int64, persistent row."""
    lengths_K: Tensor
    """int64, tokens that it holds."""
    sizes_K: Tensor
    """int64"""
    largest: int
    """Of the sizes."""
    width: int
    """Tokens of the longest row."""


def stage_ngrams(staging: Staging, table: RowTable, rows: Array, lengths: Array) -> tuple[int, int]:
    """Add those of the sampling `rows` (S,), which hold `lengths` (S,) tokens, to a step's staged arrays.

    Returns the largest size and the longest length; zeros if no row asks. A text shorter than the size of its row has
    nothing to repeat.
    """
    sizes = np.zeros(len(rows), dtype=np.int64)
    for index in np.flatnonzero(table.needs[rows] & NO_REPEATED_NGRAM).tolist():
        sequence = table.sequences[rows[index]]
        assert sequence is not None
        sizes[index] = sequence.sampling_config.no_repeat_ngram_size
    owners = np.flatnonzero((sizes > 0) & (lengths >= sizes))
    if not len(owners):
        return 0, 0
    staging.add("ngram_owners", owners)
    staging.add("ngram_sizes", sizes[owners])
    return int(sizes[owners].max()), int(lengths[owners].max())


def find_ngrams(
    arrays: dict[str, Tensor], extent: tuple[int, int], rows_S: Tensor, lengths_S: Tensor
) -> RepeatedNgrams | None:
    """What `stage_ngrams` staged, now on the device; `extent` is what it returned."""
    owners_K = arrays.get("ngram_owners")
    if owners_K is None:
        return None
    return RepeatedNgrams(
        owners_K=owners_K,
        rows_K=rows_S.index_select(0, owners_K),
        lengths_K=lengths_S.index_select(0, owners_K),
        sizes_K=arrays["ngram_sizes"],
        largest=extent[0],
        width=extent[1],
    )


def count_repeating(ngrams: RepeatedNgrams, history: Tensor, times_SV: Tensor) -> None:
    """Add to `times_SV` (int32), for each token, how often it would complete an n-gram once more.

    `history` (rows, positions) holds the tokens of each row. The tokens before every place are compared with those at
    the row's end, one distance after the other.
    """
    text_KW = history[:, : ngrams.width].index_select(0, ngrams.rows_K)
    places_W = torch.arange(ngrams.width, device=history.device)
    lengths_K1, sizes_K1 = ngrams.lengths_K[:, None], ngrams.sizes_K[:, None]
    repeats_KW = (places_W >= sizes_K1 - 1) & (places_W < lengths_K1)
    for distance in range(1, ngrams.largest):
        last_K1 = text_KW.gather(1, (lengths_K1 - distance).clamp_(min=0))
        # What is rolled in from the other end lies before the first place that is asked about.
        is_equal_KW = text_KW.roll(distance, 1) == last_K1
        repeats_KW &= is_equal_KW | (distance >= sizes_K1)
    # A prompt may hold ids beyond the vocabulary, which are never sampled.
    vocab_size = times_SV.shape[1]
    repeats_KW &= text_KW < vocab_size
    places_KW = ngrams.owners_K[:, None] * vocab_size + text_KW.clamp(max=vocab_size - 1)
    times_SV.view(-1).index_add_(0, places_KW.view(-1), repeats_KW.view(-1).int())
