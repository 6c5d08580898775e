"""Loads one rank's part of a Mamba-2 layer.

Ranks have equal shares of the groups, and of the heads, which follow each other as their groups do.
"""

from __future__ import annotations

from inflight.layers.mamba import Mamba
from inflight.models.family import MambaTensors
from inflight.models.weights import WeightLoader, times


def load_mamba(loader: WeightLoader, tensors: MambaTensors, prefix: str, hidden_size: int) -> Mamba:
    """Raises ConfigurationError if the ranks cannot have equal shares, or for tensors of other shapes."""
    loader.split("groups of Mamba's norm", tensors.num_norm_groups)
    heads = loader.even_section("Mamba heads", tensors.num_heads)
    groups = loader.even_section("Mamba groups", tensors.num_groups)
    values, shared = times(heads, tensors.head_dim), times(groups, tensors.state_dim)
    channels, conv = (values, shared, shared), f"{prefix}{tensors.conv.name}"
    return Mamba(
        inputs=loader.by_outputs(tensors.inputs, prefix, (values, *channels, heads), hidden_size),
        conv_weight_CW=loader.stacked_rows(f"{conv}.weight", channels, (1, tensors.conv.size)),
        conv_bias_C=loader.stacked_rows(f"{conv}.bias", channels) if tensors.conv.bias else None,
        activation=tensors.activation,
        a_log_H=loader.of_heads(f"{prefix}{tensors.a_log}", heads),
        d_H=loader.of_heads(f"{prefix}{tensors.d}", heads),
        dt_bias_H=loader.of_heads(f"{prefix}{tensors.dt_bias}", heads),
        norm_weight=loader.stacked_rows(f"{prefix}{tensors.norm.name}.weight", (values,)),
        norm_eps=tensors.norm_eps,
        norm_group_size=values.num_features // tensors.num_norm_groups,
        output=loader.by_inputs(tensors.output, prefix, hidden_size, values),
        num_heads=heads.size,
        num_groups=groups.size,
        head_dim=tensors.head_dim,
        state_dim=tensors.state_dim,
        time_limits=tensors.time_limits,
        dtype=loader.dtype,
    )
