"""Linear attention: a Gated DeltaNet, or Kimi Delta Attention (arXiv 2510.26692), which keeps a matrix for each head
of a sequence instead of keys and values.

Legend: T tokens, D hidden size, K key heads, V value heads (both of this rank), C channels of the convolution: queries
and keys of K heads, values of V heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.layers.part import Part
from inflight.layers.state import CHUNK, CONVOLUTION, LayerState, StateSpec, TensorSpec, Unit, chunk_inputs, last_inputs
from inflight_kernels import Activation
from inflight_kernels.recurrent.gate import Gate

RECURRENCE = "recurrence"
"""Name of the matrices that it keeps."""


@dataclass(slots=True, kw_only=True)
class GatedDeltaNet:
    inputs: Part[Any]
    """To queries, keys, values, gates (V * value_dim), betas (V) and decays (V), or what they are made of."""
    num_gates: int
    """Columns of gates, or of what they are made of."""
    expand_gates: Part[Tensor] | None
    """None = `inputs` makes gates; as the next."""
    expand_decays: Part[Tensor] | None
    """Makes a decay of each row of a head's matrix (V * key_dim)."""
    conv_weight_CW: Tensor
    activation: Activation
    """Of the convolution."""
    a_log_V: Tensor
    """float32, as the next."""
    dt_bias: Tensor
    """(V,), or of each decay."""
    gate: Gate
    """What is made of gates."""
    norm_weight: Tensor
    """(value_dim,)"""
    norm_eps: float
    output: Part[Tensor]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    """Of the activations."""

    @property
    def state_spec(self) -> StateSpec:
        matrices = TensorSpec(RECURRENCE, (self.num_value_heads, self.key_dim, self.value_dim), torch.float32)
        inputs = last_inputs(self.conv_weight_CW, self.dtype)
        num_decays = len(self.dt_bias) // self.num_value_heads
        chunk = chunk_inputs(
            self.a_log_V, self.num_value_heads, self.key_dim + self.value_dim + num_decays + 1, self.dtype
        )
        return StateSpec(unit=Unit.SEQUENCE, tensors=(inputs, matrices, *chunk))

    def __call__(self, hidden_TD: Any, state: LayerState, metadata: AttentionMetadata) -> Tensor:
        """See StatefulPart."""
        assert metadata.sequences is not None, "a step that does not say whose its tokens are"
        mixed = self.inputs(hidden_TD, metadata)
        channels, heads = self.conv_weight_CW.shape[0], self.num_value_heads
        gate_end = channels + self.num_gates
        gates, decays = mixed[:, channels:gate_end], mixed[:, gate_end + heads :]
        if self.expand_gates is not None:
            gates = self.expand_gates(gates, metadata)
        if self.expand_decays is not None:
            decays = self.expand_decays(decays, metadata)
        qkv_TC = inflight_kernels.causal_conv(
            mixed[:, :channels], self.conv_weight_CW, None, state[CONVOLUTION], metadata.sequences, self.activation
        )
        values = inflight_kernels.gated_delta_rule(
            qkv_TC,
            decays,
            mixed[:, gate_end : gate_end + heads],
            self.a_log_V,
            self.dt_bias,
            state[RECURRENCE],
            metadata.sequences,
            self.key_dim,
            state.get(CHUNK),
        )
        gated = inflight_kernels.gated_rms_norm(values, gates, self.norm_weight, self.norm_eps, self.gate)
        return self.output(gated, metadata)
