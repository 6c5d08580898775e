"""The part of a layer in which tokens see each other: products around attention over the paged KV cache.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inflight.layers.attention import Attention, AttentionMetadata
from inflight.layers.part import Part
from inflight.layers.state import LayerState, StateSpec


@dataclass(slots=True, kw_only=True)
class SelfAttention:
    qkv: Part[Any]
    attention: Attention
    output: Part[Tensor]

    @property
    def state_spec(self) -> StateSpec:
        return self.attention.state_spec

    def __call__(self, hidden_TD: Any, state: LayerState, metadata: AttentionMetadata) -> Tensor:
        """See StatefulPart."""
        return self.output(self.attention(self.qkv(hidden_TD, metadata), state, metadata), metadata)
