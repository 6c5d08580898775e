"""Mamba-2: a short convolution, the recurrence of a state space with one decay a head, and a gate, most often with a
norm.

Legend: T tokens, D hidden size, H heads, G groups of heads that share B and C, P elements of a head, N columns of its
state (all of this rank), C channels of the convolution: x of H heads, B and C of G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.layers.norm_parts import NormParts
from inflight.layers.part import Part
from inflight.layers.state import CHUNK, CONVOLUTION, LayerState, StateSpec, TensorSpec, Unit, chunk_inputs, last_inputs
from inflight_kernels import Activation

STATE_SPACE = "state space"
"""Name of the states of its heads, (H, P, N)."""


@dataclass(slots=True, kw_only=True)
class Mamba:
    inputs: Part[Any]
    """To gates (H * P), x (H * P), B (G * N), C (G * N) and steps of time (H)."""
    conv_weight_CW: Tensor
    conv_bias_C: Tensor | None
    activation: Activation
    """Of the convolution."""
    a_log_H: Tensor
    """float32, as the next two."""
    d_H: Tensor
    dt_bias_H: Tensor
    norm_weight: Tensor | None
    """(H * P,); None = a gate without a norm."""
    norm_eps: float
    norm_group_size: int
    """Elements that are normalised together."""
    norm_parts: NormParts | None
    """Of the group whose other elements other ranks have; None = this rank has all of its groups."""
    gate_first: bool
    """Whether the gate is before the norm."""
    gate_multiplier: float
    """Of gates."""
    time_multiplier: float
    """Of steps of time."""
    output: Part[Tensor]
    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    time_limits: tuple[float, float]
    """Of a token's step of time."""
    dtype: torch.dtype
    """Of the activations."""

    @property
    def state_spec(self) -> StateSpec:
        states = TensorSpec(STATE_SPACE, (self.num_heads, self.head_dim, self.state_dim), torch.float32)
        inputs = last_inputs(self.conv_weight_CW, self.dtype)
        chunk = chunk_inputs(self.a_log_H, self.num_heads, self.head_dim + self.state_dim + 1, self.dtype)
        return StateSpec(unit=Unit.SEQUENCE, tensors=(inputs, states, *chunk))

    def __call__(self, hidden_TD: Any, state: LayerState, metadata: AttentionMetadata) -> Tensor:
        """See StatefulPart."""
        assert metadata.sequences is not None, "a step that does not say whose its tokens are"
        mixed = self.inputs(hidden_TD, metadata)
        size, shared = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        steps_start = 2 * size + 2 * shared
        xbc_TC = inflight_kernels.causal_conv(
            mixed[:, size:steps_start],
            self.conv_weight_CW,
            self.conv_bias_C,
            state[CONVOLUTION],
            metadata.sequences,
            self.activation,
        )
        values = inflight_kernels.state_space_scan(
            xbc_TC[:, :size],
            xbc_TC[:, size : size + shared],
            xbc_TC[:, size + shared :],
            _times(mixed[:, steps_start:], self.time_multiplier),
            self.a_log_H,
            self.d_H,
            self.dt_bias_H,
            state[STATE_SPACE],
            metadata.sequences,
            self.time_limits,
            state.get(CHUNK),
        )
        gates = _times(mixed[:, :size], self.gate_multiplier)
        if self.norm_weight is None:
            return self.output(inflight_kernels.activate(gates, Activation.SILU) * values, metadata)
        if self.norm_parts is not None:
            (squares,) = self.norm_parts.squares([values], gates if self.gate_first else None)
            part = inflight_kernels.rms_norm_of_part(
                values, self.norm_weight, self.norm_eps, squares, gates, self.gate_first
            )
            return self.output(part, metadata)
        gated = inflight_kernels.gated_rms_norm(
            values,
            gates,
            self.norm_weight,
            self.norm_eps,
            group_size=self.norm_group_size,
            gate_first=self.gate_first,
        )
        return self.output(gated, metadata)


def _times(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier
