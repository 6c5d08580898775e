"""Copies of whole KV blocks in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_blocks(
    k_cache: Tensor | Sequence[Tensor], v_cache: Tensor | Sequence[Tensor], source: Tensor, target: Tensor
) -> None:
    """Copy blocks within every layer; pairs with a negative number are skipped."""
    kept = (source >= 0) & (target >= 0)
    source, target = source[kept].long(), target[kept].long()
    for cache in (k_cache, v_cache):
        layers = cache if not isinstance(cache, Tensor) else cache if cache.dim() == 5 else (cache,)
        for layer in layers:
            # torch cannot index float8 tensors; a uint8 view shares their memory.
            blocks = layer.view(torch.uint8) if layer.dtype.itemsize == 1 else layer
            blocks[target] = blocks[source]
