"""One layer of a decoder: attention, then the gated feed-forward, each on a normalised copy of the residual stream.

Legend: T tokens, D hidden size. A layer returns its output and the residual separately; the next norm adds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from inflight.layers.attention import Attention, AttentionMetadata, LayerCache
from inflight.layers.part import Part
from inflight.layers.rms_norm import RMSNorm


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    input_norm: RMSNorm
    qkv: Part
    attention: Attention
    output: Part
    post_attention_norm: RMSNorm
    mlp: Part

    def __call__(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, cache: LayerCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Returns (output of this layer, residual to add it to); `residual_TD` is None for the first layer."""
        if residual_TD is None:
            normed_TD, residual_TD = self.input_norm(hidden_TD, metadata), hidden_TD
        else:
            normed_TD, residual_TD = self.input_norm.add(hidden_TD, residual_TD, metadata)
        attended_TC = self.attention(self.qkv(normed_TD, metadata), cache, metadata)
        output_TD = self.output(attended_TC, metadata)
        normed_TD, residual_TD = self.post_attention_norm.add(output_TD, residual_TD, metadata)
        return self.mlp(normed_TD, metadata), residual_TD
