"""Embeddings of token ids, or of positions, looked up in a table or in a part of one. The same torch on every device;
C++ records it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.dispatch import recorder_of


def embedding(
    token_ids: Tensor, table: Tensor, first: int | None = None, factor: float = 1.0, gives_way: bool = True
) -> Tensor:
    """Rows (T, H) of `table` (rows, H) for `token_ids` (T,), int64, which may as well be positions; times `factor`.

    With a `first`, the table is a part of a larger one, from the row of that id on; ids of other parts get zeros. What
    is recorded takes rows that a batch gives in the place of those of token ids, if it `gives_way`.
    """
    if token_ids.is_meta:
        result: Tensor = recorder_of(token_ids).embedding(token_ids, table, first, factor, gives_way)
        return result
    rows = _look_up(token_ids, table, first)
    return rows if factor == 1.0 else rows.mul_(factor)


def _look_up(token_ids: Tensor, table: Tensor, first: int | None) -> Tensor:
    if first is None:
        return F.embedding(token_ids, table)
    local = token_ids - first
    elsewhere = (local < 0) | (local >= table.shape[0])
    return F.embedding(local.clamp(0, table.shape[0] - 1), table).masked_fill_(elsewhere[:, None], 0)
