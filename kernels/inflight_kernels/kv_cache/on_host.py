"""The tokens of a step whose rows are in the host's memory, in numpy.

A step of few rows is all overhead here: an operation of numpy takes a third of torch's time for it, and does not give
up the interpreter's lock, which another thread may then hold while the network could run.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight_kernels.kv_cache.step_tokens import StepTokens


def advance_rows(
    rows: Tensor,
    counts: Tensor,
    lengths: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
    padding_row: int | None = None,
    offsets: Tensor | None = None,
    token_ids: Tensor | None = None,
    places: Tensor | None = None,
) -> StepTokens:
    """The tokens of a step; adds to the length of each row its number of tokens."""
    rows_B, lengths_R, tables = rows.numpy(), lengths.numpy(), block_tables.numpy()
    begins = lengths_R[rows_B]
    ends = begins + counts.numpy()
    lengths_R[rows_B] = ends
    positions, rows_T, ends_T = begins, rows_B, ends
    if places is not None:
        places_T = places.numpy()
        positions, rows_T = begins[places_T], rows_B[places_T]
    if offsets is not None:
        positions = positions + offsets.numpy()
    if places is not None:
        ends_T = positions + 1
    ids = last_tokens.numpy()[rows_T]
    if token_ids is not None:
        given = token_ids.numpy()
        ids = np.where(given < 0, ids, given)
    blocks = positions // block_size
    slots = [
        positions + (tables[rows_T, group, blocks] - blocks) * block_size for group in range(block_tables.shape[1])
    ]
    if padding_row is not None:
        for of_group in slots:
            of_group[rows_T == padding_row] = -1
    return StepTokens(
        token_ids=torch.from_numpy(ids),
        rows=rows if places is None else torch.from_numpy(rows_T),
        positions=torch.from_numpy(positions),
        slots=tuple(map(torch.from_numpy, slots)),
        ends=torch.from_numpy(ends_T),
        seq_lens=torch.from_numpy(ends.astype(np.int32)),
    )
