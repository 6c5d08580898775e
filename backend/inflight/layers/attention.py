"""Attention over the paged KV cache, and the description of the batch that it needs. Does not know requests.

Legend: T tokens, N decoding rows, P prefilling rows, H query heads, K key/value heads (both of this rank), E head size.
A step's tokens are N decodes, one token each, then the chunks of P prefills; the two parts run different kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import inflight_kernels
from inflight.layers.given_embeddings import GivenEmbeddings
from inflight.layers.norm_parts import NormParts
from inflight.layers.state import LayerState, StateSpec, TensorSpec, Unit
from inflight_kernels import PartSquares
from inflight_kernels.kv_cache.step_blocks import StepBlocks
from inflight_kernels.recurrent.step_sequences import StepSequences

KEYS, VALUES, K_SCALES, V_SCALES = "keys", "values", "k_scales", "v_scales"
"""Names of what attention keeps, see KeyValueCache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Description of the batch for every layer, created once per step."""

    positions_T: Tensor
    """int64, position of each token in its sequence."""
    blocks: tuple[StepBlocks, ...]
    """Of each group of layers: a layer's is the one that its LayerState names."""
    num_decodes: int
    decode_rows_N: Tensor
    """int64, each one's row of the block tables."""
    decode_seq_lens_N: Tensor
    """int32, tokens in the cache after this step."""
    num_prefills: int
    prefill_rows_P: Tensor
    """int64, each one's row of the block tables."""
    prefill_seq_lens_P: Tensor
    """int32, tokens in the cache after this step."""
    prefill_start_loc: Tensor
    """int32 (P + 1), index of each prefill's first token, counted from the first prefill token."""
    max_prefill_len: int
    """Tokens of the longest chunk."""
    given: GivenEmbeddings | None = None
    """Embeddings that requests bring for some of the tokens; None = for none."""
    adapters_T: Tensor | None = None
    """int32, slot of each token's low-rank adapter, -1 where it has none; None = no token has one."""
    layer_inputs_TC: Tensor | None = None
    """What layers read of each token beside the residual stream, see LayerInputs; None = nothing."""
    sequences: StepSequences | None = None
    """For layers that keep a state for each sequence, or attend in both directions; None = there are none."""
    token_types_T: Tensor | None = None
    """int64, 1 for the tokens of the second text of a pair; None = all are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueSpec:
    """What attention keeps for each token: a key and a value for each key/value head of this rank."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """That of the activations, float8_e4m3fn or int8, which has a scale for each token and head."""
    k_scale: float = 1.0
    """What float8 keys are stored divided by; 1 for other types."""
    v_scale: float = 1.0
    """Likewise of values."""
    sliding_window: int = 0
    """Last keys that a token sees, itself included; 0 = all."""
    shared_back: int = 0
    """See StateSpec."""

    @property
    def state_spec(self) -> StateSpec:
        shape = (self.num_kv_heads, self.head_dim)
        tensors = [TensorSpec(name, shape, self.dtype) for name in (KEYS, VALUES)]
        if self.dtype == torch.int8:
            tensors += [TensorSpec(name, shape[:1], torch.float32) for name in (K_SCALES, V_SCALES)]
        return StateSpec(
            unit=Unit.BLOCK,
            tensors=tuple(tensors),
            window=self.sliding_window,
            scales=(self.k_scale, self.v_scale),
            shared_back=self.shared_back,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueCache:
    """Keys / k_scale and values / v_scale of one layer: two tensors (num_blocks, block_size, K, E)."""

    keys: Tensor
    values: Tensor
    k_scale: float | Tensor = 1.0
    """Of int8 float32 (num_blocks, block_size, K)."""
    v_scale: float | Tensor = 1.0
    group: int = 0
    """See LayerState."""

    @classmethod
    def of(cls, state: LayerState, k_scale: float = 1.0, v_scale: float = 1.0) -> KeyValueCache:
        """The scales count where the state holds none."""
        return cls(
            keys=state[KEYS],
            values=state[VALUES],
            k_scale=state.get(K_SCALES, k_scale),
            v_scale=state.get(V_SCALES, v_scale),
            group=state.group,
        )


@dataclass(slots=True, kw_only=True)
class Attention:
    """Everything between the q, k, v projection and the output projection, for this rank's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int
    """Last keys that a token sees, itself included; 0 = all."""
    cos_sin: Tensor
    """float32 (positions, rotated elements of a head), see rotary.py."""
    dtype: torch.dtype
    """Of the keys and values in the cache, see KeyValueSpec; so are the scales."""
    k_scale: float = 1.0
    v_scale: float = 1.0
    q_norm: Tensor | None = None
    """Weight of a norm of each head's queries (E,), or of all heads' together (H * E,)."""
    k_norm: Tensor | None = None
    v_norm: Tensor | None = None
    """Weight of a norm of each head's values (E,)."""
    norms_all_heads: bool = False
    norm_parts: NormParts | None = None
    """Of all heads' queries and keys where other ranks have some of them."""
    norm_eps: float = 1e-6
    adjacent_pairs: bool = False
    """Which elements of a head are rotated together, see `rope_and_kv_write`."""
    is_gated: bool = False
    """Whether gates (H * E) stand between queries and keys, by whose sigmoids the result is multiplied."""
    deterministic: bool = False
    """The bits of a token's result depend on its query and its keys and values alone."""
    soft_cap: float = 0.0
    """What no score exceeds: each score s becomes soft_cap * tanh(s / soft_cap); 0 = it stays."""
    sinks_H: Tensor | None = None
    """float32, one more logit in each head's softmax, of a key without a value."""
    values_are_keys: bool = False
    """Whether values are what keys are before their norm and rotation; then none stand behind these."""
    shared_back: int = 0
    """Where the state is another layer's, see StateSpec: queries alone are given, and attend to its keys and values."""

    @property
    def state_spec(self) -> StateSpec:
        spec = KeyValueSpec(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            sliding_window=self.sliding_window,
            shared_back=self.shared_back,
        )
        return spec.state_spec

    def __call__(self, qkv_TC: Tensor, state: LayerState, metadata: AttentionMetadata) -> Tensor:
        """(T, (H + 2K) * E), with gates (T, (2H + 2K) * E), to (T, H * E). Writes this step's keys and values to the
        cache first."""
        cache = KeyValueCache.of(state, self.k_scale, self.v_scale)
        num_queries = self.num_heads * self.head_dim
        first_key = 2 * num_queries if self.is_gated else num_queries
        attended_THE = attend(
            self._rotated(qkv_TC[:, :num_queries], qkv_TC[:, first_key:], cache, metadata),
            cache,
            metadata,
            self.scale,
            self.sliding_window,
            self.deterministic,
            soft_cap=self.soft_cap,
            sinks_H=self.sinks_H,
        )
        attended_TQ = attended_THE.view(-1, num_queries)
        if self.is_gated:
            attended_TQ = inflight_kernels.sigmoid_mul(attended_TQ, qkv_TC[:, num_queries:first_key])
        return attended_TQ

    def _rotated(self, q_TQ: Tensor, kv_TC: Tensor, cache: KeyValueCache, metadata: AttentionMetadata) -> Tensor:
        """Queries (T, H, E), once keys and values are in the cache."""
        if self.shared_back:
            return inflight_kernels.rope(
                self._by_heads(q_TQ),
                self.cos_sin,
                metadata.positions_T,
                self.q_norm,
                self.norm_eps,
                self.adjacent_pairs,
            )
        num_keys = self.num_kv_heads * self.head_dim
        k_TK = kv_TC[:, :num_keys]
        v_TKE = self._by_heads(k_TK if self.values_are_keys else kv_TC[:, num_keys:])
        if self.v_norm is not None:
            v_TKE = self._normed(v_TKE, self.v_norm)
        if self.norms_all_heads:
            squares = (None, None) if self.norm_parts is None else self.norm_parts.squares((q_TQ, k_TK))
            q_TQ, k_TK = self._normed(q_TQ, self.q_norm, squares[0]), self._normed(k_TK, self.k_norm, squares[1])
        return inflight_kernels.rope_and_kv_write(
            self._by_heads(q_TQ),
            self._by_heads(k_TK),
            v_TKE,
            self.cos_sin,
            metadata.positions_T,
            cache.keys,
            cache.values,
            metadata.blocks[cache.group].slots_T,
            None if self.norms_all_heads else self.q_norm,
            None if self.norms_all_heads else self.k_norm,
            self.norm_eps,
            cache.k_scale,
            cache.v_scale,
            self.adjacent_pairs,
        )

    def _by_heads(self, features_TC: Tensor) -> Tensor:
        """(T, heads * E) to (T, heads, E)."""
        return features_TC.view(features_TC.shape[0], -1, self.head_dim)

    def _normed(self, features_TC: Tensor, weight_C: Tensor | None, squares: PartSquares | None = None) -> Tensor:
        if weight_C is None:
            return features_TC
        if squares is not None:
            return inflight_kernels.rms_norm_of_part(features_TC, weight_C, self.norm_eps, squares)
        normed_TC = inflight_kernels.rms_norm(features_TC, weight_C, self.norm_eps)
        assert isinstance(normed_TC, Tensor)
        return normed_TC


def attend(
    q_THE: Tensor,
    cache: KeyValueCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    deterministic: bool = False,
    *,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """(T, H, E) to (T, H, elements of a value), mostly as many: causal attention of each token to its sequence's keys,
    which the cache must hold already. Those of the token's own step are read from the cache too: as they are rounded
    there for all later steps.

    With a `sliding_window` above 0 each token attends to that many last keys only, itself included. `deterministic`,
    `soft_cap` and `sinks_H`: see Attention.
    """
    out_THE = q_THE.new_empty(
        (*q_THE.shape[:2], cache.values.shape[-1])
    )  # empty_like of a meta tensor imports SymPy, for 0.3 s
    decodes, block_table = metadata.num_decodes, metadata.blocks[cache.group].block_table
    if decodes:
        inflight_kernels.decode_attention(
            q_THE[:decodes],
            cache.keys,
            cache.values,
            block_table,
            metadata.decode_seq_lens_N,
            scale,
            sliding_window,
            out=out_THE[:decodes],
            table_rows=metadata.decode_rows_N,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            deterministic=deterministic,
            soft_cap=soft_cap,
            sinks=sinks_H,
        )
    if metadata.num_prefills:
        inflight_kernels.prefill_attention(
            q_THE[decodes:],
            cache.keys,
            cache.values,
            block_table,
            metadata.prefill_start_loc,
            metadata.prefill_seq_lens_P,
            metadata.max_prefill_len,
            scale,
            sliding_window,
            out=out_THE[decodes:],
            table_rows=metadata.prefill_rows_P,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            deterministic=deterministic,
            soft_cap=soft_cap,
            sinks=sinks_H,
        )
    return out_THE
