"""The embeddings that requests bring for tokens of their prompts: from their tables into the steps that compute them.

Only the rows of a step's own tokens travel to the device, with the step, and a table is dropped once its prompt is
computed. Token ids beyond the vocabulary do not reach the network.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from inflight.layers.given_embeddings import GivenEmbeddings
from inflight.runtime.row_table import RowTable
from inflight.runtime.staging import Array, Staging
from inflight.scheduler_output import RowWork

STAND_IN = 0
"""Token id in the place of one beyond the vocabulary; what is looked up for it is overwritten."""


def stage_embeddings(
    staging: Staging, table: RowTable, works: list[RowWork], places: Array, token_ids: Array, vocab_size: int
) -> None:
    """Add the embeddings of a step's tokens to its staged arrays.

    `works` in the order of the batch; `places`: where each one's tokens start among the step's; `token_ids` of the
    step, empty if the host knows none: those beyond the vocabulary are replaced.
    """
    found: list[Array] = []
    rows: list[Array] = []
    for work, place in zip(works, places.tolist(), strict=True):
        embeddings, sequence = table.embedding_tables.get(work.row), table.sequences[work.row]
        if embeddings is None or sequence is None:
            continue
        ids = token_ids[place : place + work.num_tokens]
        own = np.flatnonzero(ids >= vocab_size)
        if len(own):
            found.append(place + own)
            rows.append(embeddings.rows(ids[own] - vocab_size))
            ids[own] = STAND_IN
        if work.start + work.num_tokens >= sequence.num_prompt_tokens:
            del table.embedding_tables[work.row]
    if found:
        staging.add("given_places", np.concatenate(found))
        staging.add("given_rows", np.concatenate(rows))


def find_embeddings(arrays: dict[str, Tensor]) -> GivenEmbeddings | None:
    """What `stage_embeddings` has staged, now on the device; None if it is nothing."""
    places_G = arrays.get("given_places")
    return None if places_G is None else GivenEmbeddings(places_G=places_G, rows_GD=arrays["given_rows"])
