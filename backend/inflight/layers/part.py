"""The interfaces of the parts that a network is composed of, and parts that scale another one's output or input.

Legend: T tokens, X and Y features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.layers.state import LayerState, StateSpec

Features = TypeVar("Features", contravariant=True)
"""Of tokens: a tensor, or what else the part before gives (fp8.py)."""


class Part(Protocol[Features]):
    """Computes each token's features from its own features.

    Every part is called with the step's metadata, so that one whose computation depends on the request of each token
    (an adapter, say) fits in the place of one whose computation does not.
    """

    def __call__(self, x_TX: Features, metadata: AttentionMetadata, /) -> Tensor:
        """(T, X), or token ids (T,), to (T, Y)."""
        ...


class StatefulPart(Protocol[Features]):
    """Computes each token's features from those of its sequence's tokens up to it, of which it keeps a state."""

    @property
    def state_spec(self) -> StateSpec: ...

    def __call__(self, x_TX: Features, state: LayerState, metadata: AttentionMetadata, /) -> Tensor:
        """(T, X) to (T, Y). Takes this step's tokens into `state`."""
        ...


@dataclass(slots=True)
class Scaled:
    """Another part's output times a constant."""

    part: Callable[..., Tensor]
    multiplier: float

    def __call__(self, *inputs: Any) -> Tensor:
        return self.part(*inputs) * self.multiplier


@dataclass(slots=True)
class OfScaled:
    """Another part's output of its input times a constant."""

    part: Part[Any]
    multiplier: float

    def __call__(self, x_TX: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.part(x_TX * self.multiplier, metadata)


@dataclass(slots=True)
class SoftCapped:
    """Another part's output y as cap * tanh(y / cap): within +-cap, and nearly y where that is small."""

    part: Callable[..., Tensor]
    cap: float

    def __call__(self, *inputs: Any) -> Tensor:
        return inflight_kernels.soft_cap(self.part(*inputs), self.cap)
