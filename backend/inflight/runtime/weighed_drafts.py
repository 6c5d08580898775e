"""Drafts that are accepted by their probability: from requests into the steps that decide about them.

Such a draft belongs to a position of its sequence's output. Each place of a step that samples at one decides about that
position's own draft, whether or not the step verifies the next ones, so the tokens do not depend on how many it has
places for. Knows no sequences beside the RowTable's.

Legend: S places that sample, K those of them with such a draft, M those of the K whose draft has logits, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.runtime.row_table import RowTable
from inflight.runtime.staging import Array, Staging
from inflight.scheduler_output import NO_DRAFT, RowWork


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedDrafts:
    """What decides about the drafts of one step, on the device."""

    places_K: Tensor
    """int64, indices among the S."""
    tokens_K: Tensor
    """int64"""
    thresholds_K: Tensor
    """float32, NaN = accepted by chance."""
    with_logits_M: Tensor | None
    """int64, indices among the K; None = no draft has logits."""
    logits_MV: Tensor | None
    """float32"""

    def logits(self, vocab_size: int) -> Tensor:
        """float32 (K, V): those of each draft, or logits that leave nothing but the draft."""
        found_KV = torch.full((len(self.tokens_K), vocab_size), -math.inf, device=self.tokens_K.device)
        found_KV.scatter_(1, self.tokens_K[:, None], 0.0)
        if self.with_logits_M is not None and self.logits_MV is not None:
            found_KV.index_copy_(0, self.with_logits_M, self.logits_MV)
        return found_KV


def stage_weighed(
    staging: Staging, table: RowTable, works: list[RowWork], sampling_rows: Array, vocab_size: int
) -> None:
    """Send the weighed drafts of the step's rows, one for each of their `sampling_rows` (S,) as far as they reach."""
    indices = {work.row: work.draft_index for work in works if work.draft_index != NO_DRAFT and work.num_sampled}
    places: list[int] = []
    tokens: list[int] = []
    thresholds: list[float] = []
    with_logits: list[int] = []
    logits: list[Array] = []
    for place, row in enumerate(sampling_rows.tolist()):
        sequence = table.sequences[row]
        if row not in indices or sequence is None or sequence.weighed_drafts is None:
            continue
        given, index = sequence.weighed_drafts, indices[row]
        if index == len(given.tokens):
            continue
        indices[row] += 1
        if given.logits:
            with_logits.append(len(places))
            numbers = np.frombuffer(given.logits, dtype="<f4", count=vocab_size, offset=4 * vocab_size * index)
            logits.append(numbers)
        places.append(place)
        tokens.append(given.tokens[index])
        thresholds.append(math.nan if given.acceptance_threshold is None else given.acceptance_threshold)
    if not places:
        return
    staging.add("weighed_places", np.array(places, dtype=np.int64))
    staging.add("weighed_tokens", np.array(tokens, dtype=np.int64))
    staging.add("weighed_thresholds", np.array(thresholds, dtype=np.float32))
    if logits:
        staging.add("weighed_with_logits", np.array(with_logits, dtype=np.int64))
        staging.add("weighed_logits", np.stack(logits).astype(np.float32, copy=False))


def find_weighed(staged: dict[str, Tensor]) -> WeighedDrafts | None:
    """What `stage_weighed` has staged; None if there is nothing."""
    if "weighed_places" not in staged:
        return None
    return WeighedDrafts(
        places_K=staged["weighed_places"],
        tokens_K=staged["weighed_tokens"],
        thresholds_K=staged["weighed_thresholds"],
        with_logits_M=staged.get("weighed_with_logits"),
        logits_MV=staged.get("weighed_logits"),
    )
