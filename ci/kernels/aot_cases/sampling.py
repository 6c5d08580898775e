"""From logits to tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels import ops

from ._meta import bf16, of


def _sample(vocab_size: int, everything: bool) -> None:
    batch = 64
    row = of(torch.float32, batch)
    count, index = of(torch.int32, batch), of(torch.int64, batch)
    extras: tuple[Tensor, ...] = ()
    if everything:
        shape = (batch, vocab_size)
        masks = of(torch.bool, *shape)
        extras = (row, row, row, masks, of(torch.int32, *shape), of(torch.float32, *shape), masks)
    flags = dict.fromkeys(("any_top_k", "any_top_p", "any_min_p"), everything)
    ops.sample(bf16(batch, vocab_size), row, count, row, row, index, index, *extras, **flags)


CASES = {
    "sample v128256 plain": lambda: _sample(128256, False),
    "sample v128256 everything": lambda: _sample(128256, True),
}
