"""Embeddings of token ids, or of positions, looked up in a table or in a part of one. The same torch on every device;
C++ records it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.dispatch import recorder_of
from inflight_kernels.matmul.coded_weight import CodedWeight


def embedding(
    token_ids: Tensor,
    table: Tensor | CodedWeight,
    first: int | None = None,
    factor: float = 1.0,
    gives_way: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows (T, H) of `table` (rows, H) for `token_ids` (T,), int64, which may as well be positions; times `factor`.

    With a `first`, the table is a part of a larger one, from the row of that id on; ids of other parts get zeros. What
    is recorded takes rows that a batch gives in the place of those of token ids, if it `gives_way`. `dtype`: of the
    rows, where the table has codes; what these mean is rounded once.
    """
    if token_ids.is_meta:
        result: Tensor = recorder_of(token_ids).embedding(token_ids, table, first, factor, gives_way, dtype)
        return result
    rows = _look_up(token_ids, table, first, dtype)
    return rows if factor == 1.0 else rows.mul_(factor)


def _look_up(token_ids: Tensor, table: Tensor | CodedWeight, first: int | None, dtype: torch.dtype | None) -> Tensor:
    if first is None:
        return _rows(token_ids, table, dtype)
    local = token_ids - first
    elsewhere = (local < 0) | (local >= table.shape[0])
    return _rows(local.clamp(0, table.shape[0] - 1), table, dtype).masked_fill_(elsewhere[:, None], 0)


def _rows(numbers: Tensor, table: Tensor | CodedWeight, dtype: torch.dtype | None) -> Tensor:
    if isinstance(table, Tensor):
        return F.embedding(numbers, table)
    return table.rows(numbers).dequantize(dtype or torch.float32)
