"""One layer of a decoder: attention, then the gated feed-forward, each on a normalised copy of the residual stream.

Legend: T tokens, D hidden size. A layer returns its output and the residual separately; the next norm adds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from inflight.layers.attention import Attention, AttentionMetadata, LayerCache
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mlp import GatedMLP
from inflight.layers.rms_norm import RMSNorm


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    input_norm: RMSNorm
    qkv: ColumnParallelLinear
    attention: Attention
    output: RowParallelLinear
    post_attention_norm: RMSNorm
    mlp: GatedMLP

    @property
    def linears(self) -> tuple[ColumnParallelLinear | RowParallelLinear, ...]:
        """The matrix products, in the order of their computation."""
        return self.qkv, self.output, self.mlp.gate_up, self.mlp.down

    def __call__(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, cache: LayerCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Returns (output of this layer, residual to add it to); `residual_TD` is None for the first layer."""
        if residual_TD is None:
            normed_TD, residual_TD = self.input_norm(hidden_TD), hidden_TD
        else:
            normed_TD, residual_TD = self.input_norm.add(hidden_TD, residual_TD)
        attended_TC = self.attention(self.qkv(normed_TD), cache, metadata)
        normed_TD, residual_TD = self.post_attention_norm.add(self.output(attended_TC), residual_TD)
        return self.mlp(normed_TD), residual_TD
