"""One layer of a decoder: branches, each of which adds to the residual stream what it computes of it.

    stream = stream + norm_after(part(norm(stream)))

Most networks have two, attention and then a feed-forward, with a norm before each. Some have norms behind the parts
too, or only there, and in some both branches read the same stream. The network normalises the stream for the first
branch of a layer. The layer returns what its last branch computes and the stream separately, and the first norm of the
next layer adds them: one operation reads both, adds and normalises.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inflight.layers.attention import AttentionMetadata, LayerCache
from inflight.layers.norm import Norm
from inflight.layers.part import Part
from inflight.layers.self_attention import SelfAttention


@dataclass(slots=True, kw_only=True)
class Branch:
    norm: Norm[Any]
    part: SelfAttention | Part[Any]
    """Takes what `norm` gives."""
    norm_after: Norm[Tensor] | None = None

    def __call__(self, normed_TD: Any, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        if isinstance(self.part, SelfAttention):
            output_TD = self.part(normed_TD, cache, metadata)
        else:
            output_TD = self.part(normed_TD, metadata)
        return output_TD if self.norm_after is None else self.norm_after(output_TD, metadata)


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    branches: Sequence[Branch]
    """One of them is attention."""
    is_parallel: bool = False
    """Whether all read the stream that the layer begins with; else each one reads what those before it have added."""

    @property
    def norm(self) -> Norm[Any]:
        """What the layer begins with."""
        return self.branches[0].norm

    @property
    def attention(self) -> SelfAttention:
        return next(branch.part for branch in self.branches if isinstance(branch.part, SelfAttention))

    def __call__(
        self, normed_TD: Any, stream_TD: Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """(output of this layer, residual to add it to) for the residual stream and what `norm` makes of it."""
        first, *others = self.branches
        output_TD = first(normed_TD, cache, metadata)
        for branch in others:
            if self.is_parallel:
                # Those that share a norm read the same.
                own_TD = normed_TD if branch.norm is first.norm else branch.norm(stream_TD, metadata)
                output_TD = output_TD + branch(own_TD, cache, metadata)
            else:
                normed_TD, stream_TD = branch.norm.add(output_TD, stream_TD, metadata)
                output_TD = branch(normed_TD, cache, metadata)
        return output_TD, stream_TD
