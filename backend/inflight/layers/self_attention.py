"""The part of a layer in which tokens see each other: products around attention over the paged KV cache.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inflight.layers.attention import Attention, AttentionMetadata, LayerCache
from inflight.layers.part import Part


@dataclass(slots=True, kw_only=True)
class SelfAttention:
    qkv: Part[Any]
    attention: Attention
    output: Part[Tensor]

    def __call__(self, hidden_TD: Any, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """(T, D), or what a norm makes of it, to (T, D). Writes this step's keys and values into `cache`."""
        return self.output(self.attention(self.qkv(hidden_TD, metadata), cache, metadata), metadata)
