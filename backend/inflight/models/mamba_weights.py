"""Loads one rank's part of a Mamba-2 layer.

Ranks have equal shares of the groups, and of the heads, which follow each other as their groups do.
"""

from __future__ import annotations

from torch import Tensor

from inflight.layers.mamba import Mamba
from inflight.layers.part import OfScaled, Part
from inflight.models.mixer_tensors import MambaTensors
from inflight.models.weights import WeightLoader, times


def load_mamba(loader: WeightLoader, tensors: MambaTensors, prefix: str, hidden_size: int) -> Mamba:
    """Raises ConfigurationError if the ranks cannot have equal shares, or for tensors of other shapes."""
    if tensors.norm is not None:
        loader.split("groups of Mamba's norm", tensors.num_norm_groups)
    heads = loader.even_section("Mamba heads", tensors.num_heads)
    groups = loader.even_section("Mamba groups", tensors.num_groups)
    values, shared = times(heads, tensors.head_dim), times(groups, tensors.state_dim)
    channels, conv = (values, shared, shared), f"{prefix}{tensors.conv.names[0]}"
    inputs: Part[Tensor] = loader.by_outputs(tensors.inputs, prefix, (values, *channels, heads), hidden_size)
    scales = tensors.multipliers
    if scales.input != 1.0:
        inputs = OfScaled(inputs, scales.input)
    of_channels = (scales.x, scales.b, scales.c)
    return Mamba(
        inputs=inputs,
        # In float32, where they are other than 1: a channel's constant is one of its weights.
        conv_weight_CW=loader.stacked_rows(f"{conv}.weight", channels, (1, tensors.conv.size), of_channels),
        conv_bias_C=loader.stacked_rows(f"{conv}.bias", channels) if tensors.conv.bias else None,
        activation=tensors.activation,
        a_log_H=loader.of_heads(f"{prefix}{tensors.a_log}", heads),
        d_H=loader.of_heads(f"{prefix}{tensors.d}", heads),
        dt_bias_H=loader.of_heads(f"{prefix}{tensors.dt_bias}", heads),
        norm_weight=None
        if tensors.norm is None
        else loader.stacked_rows(f"{prefix}{tensors.norm.name}.weight", (values,)),
        norm_eps=tensors.norm_eps,
        norm_group_size=values.num_features // tensors.num_norm_groups,
        gate_first=tensors.gate_first,
        gate_multiplier=scales.gate,
        time_multiplier=scales.time,
        output=loader.by_inputs(tensors.output, prefix, hidden_size, values),
        num_heads=heads.size,
        num_groups=groups.size,
        head_dim=tensors.head_dim,
        state_dim=tensors.state_dim,
        time_limits=tensors.time_limits,
        dtype=loader.dtype,
    )
