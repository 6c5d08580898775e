"""The part of an encoder's layer in which tokens see each other, all of a text's in both directions. No state is kept.

Legend: T tokens, D hidden size, H query heads, K key/value heads (both of this rank), E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.layers.part import Part


@dataclass(slots=True, kw_only=True)
class EncoderAttention:
    """See Part."""

    qkv: Part[Any]
    """(T, D) to (T, (H + 2K) * E): queries, keys, values."""
    output: Part[Tensor]
    """(T, H * E) to (T, D)."""
    num_heads: int
    head_dim: int
    scale: float
    window: int = 0
    """Tokens before and behind it that a token sees; 0 = all."""
    cos_sin: Tensor | None = None
    """float32 (positions, rotary size), see `rope`; None = queries and keys are not rotated."""
    bias_HP: Tensor | None = None
    """float32, what is added to scores by the distance of their tokens, see `bidirectional_attention`."""

    def __call__(self, hidden_TD: Any, metadata: AttentionMetadata) -> Tensor:
        assert metadata.sequences is not None, "an encoder must know whose tokens a step has"
        qkv_TC = self.qkv(hidden_TD, metadata)
        num_queries = self.num_heads * self.head_dim
        num_keys = (qkv_TC.shape[1] - num_queries) // 2
        sizes = (num_queries, num_keys, num_keys)
        q_THE, k_TKE, v_TKE = (self._by_heads(part_TC) for part_TC in qkv_TC.split_with_sizes(sizes, 1))
        if self.cos_sin is not None:
            q_THE = inflight_kernels.rope(q_THE, self.cos_sin, metadata.positions_T)
            k_TKE = inflight_kernels.rope(k_TKE, self.cos_sin, metadata.positions_T)
        attended_THE = inflight_kernels.bidirectional_attention(
            q_THE,
            k_TKE,
            v_TKE,
            metadata.sequences.starts,
            max(metadata.max_prefill_len, 1),
            self.scale,
            self.window,
            self.bias_HP,
        )
        return self.output(attended_THE.flatten(1), metadata)

    def _by_heads(self, features_TC: Tensor) -> Tensor:
        """(T, heads * E) to (T, heads, E)."""
        return features_TC.view(features_TC.shape[0], -1, self.head_dim)
