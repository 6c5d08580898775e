"""What a network offers to the runtime, whichever way it computes.

Legend: T tokens, B rows that sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from inflight.layers.attention import AttentionMetadata, CacheSpec, LayerCache


class Network(Protocol):
    """One rank's network. It keeps nothing between steps: what it must remember lies in the caches."""

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """One for each cache that `forward` is to be given, in their order. Layers may differ."""
        ...

    def forward(self, token_ids_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata) -> Tensor:
        """Hidden states (T, D), ready for `logits`. Writes this step's keys and values into `caches`."""
        ...

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """(B, V) of the tokens that sample, equal on every rank."""
        ...
