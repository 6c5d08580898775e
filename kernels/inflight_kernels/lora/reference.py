"""Low-rank adapters in torch: one adapter after the other, one slice after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def lora_add(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    adapters: Tensor,
    scales: Tensor,
    slices: Sequence[int] | None = None,
    deterministic: bool = False,
    ranks: Tensor | None = None,
) -> Tensor:
    """y[rows] += scale * (x[rows] a^T) b^T for the rows of each adapter."""
    widths = [b.shape[1]] if slices is None else list(slices)
    rank = b.shape[2]
    for adapter in adapters.unique().tolist():
        if not 0 <= adapter < a.shape[0]:
            continue
        used = rank if ranks is None else int(ranks[adapter])
        if not used:
            continue
        rows = (adapters == adapter).nonzero().flatten()
        inputs = x[rows]
        begin = 0
        for index, width in enumerate(widths):
            columns = slice(begin, begin + width)
            narrow = F.linear(inputs, a[adapter, index * rank : index * rank + used])
            product = F.linear(narrow, b[adapter, columns, :used])
            total = y[rows, columns].float() + scales[adapter] * product.float()
            y[rows, columns] = total.to(y.dtype)
            begin += width
    return y
