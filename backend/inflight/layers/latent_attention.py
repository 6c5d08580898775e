"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): tokens see each other through one small row for each.

A token's row is a latent, of which every head makes its own key and value by a matrix of its own, and the rotated part
of the key, which all heads share. No key or value is ever made: the matrix of a head's keys is multiplied with its
query instead, so that the query fits latents, and that of its values with what the head gathers of the latents. So
attention is that of many query heads to one key head whose values are the first elements of its keys, in prompts and
decodes alike.

Legend: T tokens, D hidden size, H heads of this rank, N elements of a head's query that are not rotated, R that are,
L of a latent, V of a head's value, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata, KeyValueCache, attend
from inflight.layers.norm import Norm
from inflight.layers.part import Part
from inflight.layers.state import LayerState, StateSpec, TensorSpec, Unit

LATENTS, SCALES = "latents", "scales"
"""Names of what it keeps: rows (1, L + R), and of int8 the scale of each."""


@dataclass(slots=True, kw_only=True)
class QueryExpansion:
    """Makes queries of a narrow form of them."""

    norm: Norm[Any]
    linear: Part[Any]

    def __call__(self, narrow_TC: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.linear(self.norm(narrow_TC, metadata), metadata)


@dataclass(slots=True, kw_only=True)
class LatentAttention:
    down: Part[Any]
    """Queries, or what they are made of, and behind them the row of a token, all of which every rank computes."""
    expand_queries: QueryExpansion | None
    """None = `down` makes the queries of this rank's heads."""
    keys_HLN: Tensor
    """Transposed: a query (N,) becomes one (L,) for latents."""
    values_HVL: Tensor
    latent_norm_L: Tensor
    norm_eps: float
    cos_sin: Tensor
    """float32 (positions, R), see rotary.py."""
    scale: float
    """Factor of the scores."""
    adjacent_pairs: bool
    """Which elements are rotated together, see `rope_and_kv_write`."""
    dtype: torch.dtype
    """Of the rows that are kept: that of the activations, float8_e4m3fn, or int8, which has a scale for each row."""
    cache_scale: float = 1.0
    """What float8 rows are stored divided by; 1 for other types."""
    deterministic: bool = False
    """The bits of a token's result depend on its query and the rows that it sees alone."""
    output: Part[Tensor]

    @property
    def state_spec(self) -> StateSpec:
        tensors = [TensorSpec(LATENTS, (1, self._row_size), self.dtype)]
        if self.dtype == torch.int8:
            tensors.append(TensorSpec(SCALES, (1,), torch.float32))
        return StateSpec(unit=Unit.BLOCK, tensors=tuple(tensors), scales=(self.cache_scale,))

    def __call__(self, hidden_TD: Any, state: LayerState, metadata: AttentionMetadata) -> Tensor:
        """See StatefulPart."""
        rows, scale = state[LATENTS], state.get(SCALES, self.cache_scale)
        num_heads, latent_size, plain_size = self.keys_HLN.shape
        narrow_TC = self.down(hidden_TD, metadata)
        q_TC, latent_TC = narrow_TC[:, : -self._row_size], narrow_TC[:, -self._row_size :]
        if self.expand_queries is not None:
            q_TC = self.expand_queries(q_TC, metadata)
        q_THC = q_TC.view(q_TC.shape[0], num_heads, -1)
        queries_THC = q_THC.new_empty((q_THC.shape[0], num_heads, self._row_size))
        inflight_kernels.head_linear(
            q_THC[..., :plain_size], self.keys_HLN, queries_THC[..., :latent_size], self.deterministic
        )
        inflight_kernels.rope_and_latent_write(
            q_THC[..., plain_size:],
            latent_TC,
            self.latent_norm_L,
            self.norm_eps,
            self.cos_sin,
            metadata.positions_T,
            rows,
            metadata.blocks[state.group].slots_T,
            queries_THC[..., latent_size:],
            scale,
            self.adjacent_pairs,
        )
        cache = KeyValueCache(
            keys=rows, values=rows[..., :latent_size], k_scale=scale, v_scale=scale, group=state.group
        )
        gathered_THL = attend(queries_THC, cache, metadata, self.scale, 0, self.deterministic)
        values_THV = inflight_kernels.head_linear(gathered_THL, self.values_HVL, deterministic=self.deterministic)
        return self.output(values_THV.flatten(1), metadata)

    @property
    def _row_size(self) -> int:
        return self.keys_HLN.shape[1] + self.cos_sin.shape[1]
