"""The interface of a network to the runtime, whichever code computes it.

Legend: T tokens, B rows that sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from inflight.layers.attention import AttentionMetadata, CacheSpec, LayerCache


class Network(Protocol):
    """One rank's network. It has no state between steps except the caches, which the caller owns."""

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """One spec for each cache that `forward` takes, in the same order. Layers may differ."""
        ...

    def forward(self, token_ids_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata, /) -> Tensor:
        """Hidden states (T, D), ready for `logits`. Writes this step's keys and values into `caches`."""
        ...

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Logits (B, V) of the rows that sample, equal on every rank."""
        ...


@runtime_checkable
class LayeredNetwork(Network, Protocol):
    """A Network that can tell what its layers put out."""

    @property
    def num_layers(self) -> int: ...

    def forward_layers(
        self, token_ids_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata, wanted: frozenset[int], /
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """What `forward` gives, and by number the outputs (T, D) of the `wanted` layers: what the next one begins with,
        equal on every rank."""
        ...
