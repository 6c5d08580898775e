"""One layer of a decoder: branches, each of which adds to the residual stream what it computes of it.

    stream = stream + norm_after(part(norm(stream)))

Most networks have two, attention and then a feed-forward, with a norm before each. Some have norms behind the parts
too, or only there, and in some there are branches beside each other, which read the same stream. The network normalises
the stream for the first branch of a layer. The layer returns what its last branch computes and the stream separately,
and the first norm of the next layer adds them: one operation reads both, adds and normalises.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inflight.layers.attention import AttentionMetadata
from inflight.layers.norm import Norm
from inflight.layers.part import Part, StatefulPart
from inflight.layers.state import LayerState, StateSpec


@dataclass(slots=True, kw_only=True)
class Branch:
    norm: Norm[Any]
    part: Part[Any] | None = None
    """Takes what `norm` gives; so does a part with a state, which stands in `stateful` instead."""
    stateful: StatefulPart[Any] | None = None
    norm_after: Norm[Tensor] | None = None
    is_beside: bool = False
    """Whether it reads the stream that the branch before it reads, and adds to what that one computes; else it reads
    what those before it have added."""
    norm_of_sum: Norm[Tensor] | None = None
    """Of what it and those that it is beside compute together."""

    def __call__(self, normed_TD: Any, states: Iterator[LayerState], metadata: AttentionMetadata) -> Tensor:
        """`states`: the next is its own, if it has one."""
        if self.stateful is not None:
            output_TD = self.stateful(normed_TD, next(states), metadata)
        else:
            assert self.part is not None, "a branch without a part"
            output_TD = self.part(normed_TD, metadata)
        return output_TD if self.norm_after is None else self.norm_after(output_TD, metadata)


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    branches: Sequence[Branch]
    scale: float = 1.0
    """Factor of the residual stream behind the layer."""

    @property
    def norm(self) -> Norm[Any]:
        """What the layer begins with."""
        return self.branches[0].norm

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Of the branches that keep a state, in their order."""
        return tuple(branch.stateful.state_spec for branch in self.branches if branch.stateful is not None)

    def __call__(
        self, normed_TD: Any, stream_TD: Tensor, states: Iterator[LayerState], metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """(output of this layer, residual to add it to; None = it is added) for the residual stream and what `norm`
        makes of it. Takes as many `states` as it has `state_specs`."""
        first, *others = self.branches
        norm, output_TD = first.norm, first(normed_TD, states, metadata)
        for branch in others:
            if branch.is_beside:
                # Those that share a norm read the same.
                own_TD = normed_TD if branch.norm is norm else branch.norm(stream_TD, metadata)
                output_TD = output_TD + branch(own_TD, states, metadata)
                output_TD = output_TD if branch.norm_of_sum is None else branch.norm_of_sum(output_TD, metadata)
            else:
                norm = branch.norm
                normed_TD, stream_TD = branch.norm.add(output_TD, stream_TD, metadata)
                output_TD = branch(normed_TD, states, metadata)
        return (output_TD, stream_TD) if self.scale == 1.0 else ((output_TD + stream_TD) * self.scale, None)
