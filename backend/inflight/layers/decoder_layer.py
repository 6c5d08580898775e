"""One layer of a decoder: attention, then the gated feed-forward, each on a normalised copy of the residual stream.

Legend: T tokens, D hidden size. The network normalises the residual stream for a layer. The layer returns its output
and the residual separately, and the norm of the next one adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inflight.layers.attention import Attention, AttentionMetadata, LayerCache
from inflight.layers.part import Part
from inflight.layers.rms_norm import Norm


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    input_norm: Norm[Any]
    qkv: Part[Any]
    """Takes what `input_norm` gives."""
    attention: Attention
    output: Part[Tensor]
    post_attention_norm: Norm[Any]
    mlp: Part[Any]
    """Takes what `post_attention_norm` gives."""

    def __call__(
        self, normed_TD: Any, stream_TD: Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """(output of this layer, residual to add it to) for the residual stream and what `input_norm` makes of it."""
        attended_TC = self.attention(self.qkv(normed_TD, metadata), cache, metadata)
        output_TD = self.output(attended_TC, metadata)
        normed_TD, stream_TD = self.post_attention_norm.add(output_TD, stream_TD, metadata)
        return self.mlp(normed_TD, metadata), stream_TD
