"""The interface of a network to the runtime, whichever code computes it.

Legend: T tokens, B rows that sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from inflight.layers.attention import AttentionMetadata
from inflight.layers.state import LayerState, StateSpec


class Network(Protocol):
    """One rank's network. It has no state between steps except the one that the caller owns."""

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """One spec for each state that `forward` takes, in the same order: of every part that keeps one."""
        ...

    def forward(self, token_ids_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata, /) -> Tensor:
        """Hidden states (T, D), ready for `logits`. Takes this step's tokens into `states`."""
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
        self, token_ids_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata, wanted: frozenset[int], /
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """What `forward` gives, and by number the outputs (T, D) of the `wanted` layers: what the next one begins with,
        equal on every rank."""
        ...
