"""A decoder layer on a CPU: matrix products with packed weights and compiled programs between them; for a step of one
token, one program with plain weights.

Computes what DecoderLayer computes. Knows no network. Legend as in decoder_layer.py and attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.layers.attention import AttentionMetadata, LayerCache
from inflight.layers.decoder_layer import DecoderLayer
from inflight_kernels.cpu import (
    DecoderKernels,
    HugePageArena,
    LayerShape,
    TokenLayer,
    pack_weight,
    packed_linear,
)


def layer_shape(layer: DecoderLayer) -> LayerShape:
    """What of a layer is built into its programs: layers of one shape share them."""
    attention = layer.attention
    return LayerShape(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        sliding_window=attention.sliding_window,
        norm_eps=layer.input_norm.eps,
        qk_norm_eps=attention.norm_eps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPrograms:
    """What layers of one shape share."""

    kernels: DecoderKernels
    token_layer: TokenLayer | None
    """None where memory has no room for plain weights beside the packed ones."""


def load_programs(layer: DecoderLayer, cache: LayerCache, *, keep_plain: bool) -> LayerPrograms:
    """The programs for layers of this one's shape, which still has its weights."""
    attention, shape = layer.attention, layer_shape(layer)
    kernels = DecoderKernels(
        shape,
        cos_sin=attention.cos_sin,
        keys=cache.keys,
        values=cache.values,
        norm=layer.input_norm.weight_D,
        qkv=layer.qkv.weight_OI.shape[0],
        gate_up=layer.mlp.gate_up.weight_OI.shape[0],
        head_norm=attention.q_norm_E,
    )
    token_layer = None
    if keep_plain:
        token_layer = TokenLayer(
            shape,
            keys=cache.keys,
            values=cache.values,
            cos_sin=attention.cos_sin,
            weights=_token_weights(layer, [linear.weight_OI for linear in layer.linears]),
        )
    return LayerPrograms(kernels=kernels, token_layer=token_layer)


@dataclass(slots=True, kw_only=True)
class CompiledDecoderLayer:
    """Built by `compile_layer`; called like a DecoderLayer."""

    layer: DecoderLayer
    """Without the weights of its products."""
    programs: LayerPrograms
    packed_qkv: Tensor
    packed_output: Tensor
    packed_gate_up: Tensor
    packed_down: Tensor
    token_weights: list[Tensor]
    """What the program for one token takes; empty if there is none."""

    def __call__(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, cache: LayerCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """See DecoderLayer."""
        if residual_TD is None:
            residual_TD = torch.zeros_like(hidden_TD)
        if self.programs.token_layer is not None and hidden_TD.shape[0] == 1:
            return self._one_token(self.programs.token_layer, hidden_TD, residual_TD, cache, metadata)

        q_THE, residual_TD = self._before_attention(hidden_TD, residual_TD, cache, metadata)
        attended_TC = self._attend(q_THE, cache, metadata).view(hidden_TD.shape[0], -1)
        return self._after_attention(attended_TC, residual_TD)

    def _before_attention(
        self, hidden_TD: Tensor, residual_TD: Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """(queries, residual); keys and values go to the cache."""
        layer, kernels, attention = self.layer, self.programs.kernels, self.layer.attention
        normed_TD, residual_TD = kernels.add_norm(hidden_TD, residual_TD, layer.input_norm.weight_D)
        qkv_TC = packed_linear(normed_TD, self.packed_qkv, layer.qkv.bias_O)
        q_THE = kernels.rope_and_write(
            qkv_TC,
            attention.cos_sin,
            metadata.positions_T,
            cache.keys,
            cache.values,
            metadata.slot_mapping_T,
            attention.q_norm_E,
            attention.k_norm_E,
        )
        return q_THE, residual_TD

    def _after_attention(self, attended_TC: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer gives."""
        layer, kernels = self.layer, self.programs.kernels
        added_TD = packed_linear(attended_TC, self.packed_output, layer.output.bias_O)
        normed_TD, residual_TD = kernels.add_norm(added_TD, residual_TD, layer.post_attention_norm.weight_D)
        gate_up_TI = packed_linear(normed_TD, self.packed_gate_up, layer.mlp.gate_up.bias_O)
        return packed_linear(kernels.silu_and_mul(gate_up_TI), self.packed_down, layer.mlp.down.bias_O), residual_TD

    def _attend(self, q_THE: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        decodes = metadata.num_decodes
        if not metadata.num_prefills:
            return self._decode(q_THE, cache, metadata)
        attended_THE = torch.empty_like(q_THE)
        if decodes:
            attended_THE[:decodes] = self._decode(q_THE[:decodes], cache, metadata)
        self.layer.attention.attend_prefills(q_THE[decodes:], attended_THE[decodes:], cache, metadata)
        return attended_THE

    def _decode(self, q_NHE: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        return self.programs.kernels.decode_attention(
            q_NHE, cache.keys, cache.values, _wide(metadata.decode_block_table), metadata.decode_seq_lens_N
        )

    def _one_token(
        self,
        token_layer: TokenLayer,
        hidden_1D: Tensor,
        residual_1D: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """A chunk of one prompt token is a decode by another name."""
        if metadata.num_decodes:
            block_table, seq_len_1 = metadata.decode_block_table, metadata.decode_seq_lens_N
        else:
            block_table, seq_len_1 = metadata.prefill_block_table, metadata.prefill_seq_lens_P
        return token_layer(
            hidden_1D,
            residual_1D,
            metadata.positions_T,
            metadata.slot_mapping_T,
            _wide(block_table),
            seq_len_1,
            cache.keys,
            cache.values,
            self.layer.attention.cos_sin,
            self.token_weights,
        )


def compile_layer(layer: DecoderLayer, programs: LayerPrograms, arena: HugePageArena) -> CompiledDecoderLayer:
    """`layer`, which gives up the weights of its products, to be run by `programs`; plain ones go to `arena`."""
    weights, token_weights = [linear.weight_OI for linear in layer.linears], []
    if programs.token_layer is not None:
        weights = [arena.copy(weight) for weight in weights]
        token_weights = [weight for weight in _token_weights(layer, weights) if weight is not None]
    qkv, output, gate_up, down = map(pack_weight, weights)
    for linear in layer.linears:
        # Memory is to hold it no more often than it is read.
        linear.weight_OI = linear.weight_OI.new_empty(0)
    return CompiledDecoderLayer(
        layer=layer,
        programs=programs,
        packed_qkv=qkv,
        packed_output=output,
        packed_gate_up=gate_up,
        packed_down=down,
        token_weights=token_weights,
    )


def _token_weights(layer: DecoderLayer, weights: list[Tensor]) -> list[Tensor | None]:
    """The order of `TokenLayer`; `weights` are those of `layer.linears`."""
    attention, mlp = layer.attention, layer.mlp
    qkv, output, gate_up, down = weights
    return [
        layer.input_norm.weight_D,
        qkv,
        layer.qkv.bias_O,
        attention.q_norm_E,
        attention.k_norm_E,
        output,
        layer.output.bias_O,
        layer.post_attention_norm.weight_D,
        gate_up,
        mlp.gate_up.bias_O,
        down,
        mlp.down.bias_O,
    ]


def _wide(block_table: Tensor) -> Tensor:
    """At least two blocks wide, as the programs are built for; what a row does not have is masked by its length."""
    return F.pad(block_table, (0, 1)) if block_table.shape[1] == 1 else block_table
