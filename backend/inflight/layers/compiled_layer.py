"""A decoder layer on a CPU: matrix products with packed weights, and compiled programs between them.

Computes what DecoderLayer computes. Knows no network. Legend as in decoder_layer.py and attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.layers.attention import AttentionMetadata, LayerCache
from inflight.layers.decoder_layer import DecoderLayer
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight_kernels.cpu import DecoderKernels, LayerShape, pack_weight, packed_linear


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


def load_kernels(layer: DecoderLayer, cache: LayerCache) -> DecoderKernels:
    """The programs for layers of this one's shape."""
    attention = layer.attention
    return DecoderKernels(
        layer_shape(layer),
        cos_sin=attention.cos_sin,
        keys=cache.keys,
        values=cache.values,
        norm=layer.input_norm.weight_D,
        qkv=layer.qkv.weight_OI.shape[0],
        gate_up=layer.mlp.gate_up.weight_OI.shape[0],
        head_norm=attention.q_norm_E,
    )


@dataclass(slots=True, kw_only=True)
class CompiledDecoderLayer:
    """Built by `compile_layer`; called like a DecoderLayer."""

    layer: DecoderLayer
    """Without the weights that are packed."""
    kernels: DecoderKernels
    packed_qkv: Tensor
    packed_output: Tensor
    packed_gate_up: Tensor
    packed_down: Tensor

    def __call__(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, cache: LayerCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """See DecoderLayer."""
        layer, kernels = self.layer, self.kernels
        if residual_TD is None:
            residual_TD = torch.zeros_like(hidden_TD)
        normed_TD, residual_TD = kernels.add_norm(hidden_TD, residual_TD, layer.input_norm.weight_D)
        qkv_TC = packed_linear(normed_TD, self.packed_qkv, layer.qkv.bias_O)
        attended_TC = self._attend(qkv_TC, cache, metadata)
        added_TD = packed_linear(attended_TC, self.packed_output, layer.output.bias_O)
        normed_TD, residual_TD = kernels.add_norm(added_TD, residual_TD, layer.post_attention_norm.weight_D)
        gate_up_TI = packed_linear(normed_TD, self.packed_gate_up, layer.mlp.gate_up.bias_O)
        return packed_linear(kernels.silu_and_mul(gate_up_TI), self.packed_down, layer.mlp.down.bias_O), residual_TD

    def _attend(self, qkv_TC: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        attention, decodes = self.layer.attention, metadata.num_decodes
        q_THE = self.kernels.rope_and_write(
            qkv_TC,
            attention.cos_sin,
            metadata.positions_T,
            cache.keys,
            cache.values,
            metadata.slot_mapping_T,
            attention.q_norm_E,
            attention.k_norm_E,
        )
        if not metadata.num_prefills:
            return self._decode(q_THE, cache, metadata).view(qkv_TC.shape[0], -1)
        attended_THE = torch.empty_like(q_THE)
        if decodes:
            attended_THE[:decodes] = self._decode(q_THE[:decodes], cache, metadata)
        attention.attend_prefills(q_THE[decodes:], attended_THE[decodes:], cache, metadata)
        return attended_THE.view(qkv_TC.shape[0], -1)

    def _decode(self, q_NHE: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        return self.kernels.decode_attention(
            q_NHE, cache.keys, cache.values, _wide(metadata.decode_block_table), metadata.decode_seq_lens_N
        )


def compile_layer(layer: DecoderLayer, kernels: DecoderKernels) -> CompiledDecoderLayer:
    """`layer`, which gives up its weights, to be run by `kernels`."""
    return CompiledDecoderLayer(
        layer=layer,
        kernels=kernels,
        packed_qkv=_take_packed(layer.qkv),
        packed_output=_take_packed(layer.output),
        packed_gate_up=_take_packed(layer.mlp.gate_up),
        packed_down=_take_packed(layer.mlp.down),
    )


def _take_packed(linear: ColumnParallelLinear | RowParallelLinear) -> Tensor:
    """Its weight, laid out; the plain one goes, so that memory holds it once."""
    packed = pack_weight(linear.weight_OI)
    linear.weight_OI = linear.weight_OI.new_empty(0)
    return packed


def _wide(block_table: Tensor) -> Tensor:
    """At least two blocks wide, as the programs are built for; what a row does not have is masked by its length."""
    return F.pad(block_table, (0, 1)) if block_table.shape[1] == 1 else block_table
