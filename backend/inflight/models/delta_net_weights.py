"""Loads one rank's part of a Gated DeltaNet.

Ranks have equal shares of the key heads and those value heads that belong to them.
"""

from __future__ import annotations

from inflight.layers.gated_delta_net import GatedDeltaNet
from inflight.models.family import DeltaNetTensors
from inflight.models.weights import WeightLoader, times


def load_delta_net(loader: WeightLoader, tensors: DeltaNetTensors, prefix: str, hidden_size: int) -> GatedDeltaNet:
    """Raises ConfigurationError if the ranks cannot have equal shares, or for tensors of other shapes."""
    key_heads = loader.even_section("linear_num_key_heads", tensors.num_key_heads)
    value_heads = loader.even_section("linear_num_value_heads", tensors.num_value_heads)
    keys, values = times(key_heads, tensors.key_dim), times(value_heads, tensors.value_dim)
    channels = (keys, keys, values)
    inputs = loader.by_outputs(tensors.inputs, prefix, (*channels, values, value_heads, value_heads), hidden_size)
    return GatedDeltaNet(
        inputs=inputs,
        conv_weight_CW=loader.stacked_rows(f"{prefix}{tensors.conv.name}.weight", channels, (1, tensors.conv.size)),
        activation=tensors.activation,
        a_log_V=loader.of_heads(f"{prefix}{tensors.a_log}", value_heads),
        dt_bias_V=loader.of_heads(f"{prefix}{tensors.dt_bias}", value_heads),
        norm_weight=loader.vector(f"{prefix}{tensors.head_norm.name}.weight", tensors.value_dim),
        norm_eps=tensors.norm_eps,
        output=loader.by_inputs(tensors.output, prefix, hidden_size, values),
        num_key_heads=key_heads.size,
        num_value_heads=value_heads.size,
        key_dim=tensors.key_dim,
        value_dim=tensors.value_dim,
        dtype=loader.dtype,
    )
