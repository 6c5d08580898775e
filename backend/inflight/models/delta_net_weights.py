"""Loads one rank's part of a Gated DeltaNet.

Ranks have equal shares of the key heads and those value heads that belong to them.
"""

from __future__ import annotations

import torch

from inflight.layers.gated_delta_net import GatedDeltaNet
from inflight.models.mixer_tensors import DeltaNetTensors
from inflight.models.weights import Section, WeightLoader, times


def load_delta_net(loader: WeightLoader, tensors: DeltaNetTensors, prefix: str, hidden_size: int) -> GatedDeltaNet:
    """Raises ConfigurationError if the ranks cannot have equal shares, or for tensors of other shapes."""
    key_heads = loader.even_section("linear_num_key_heads", tensors.num_key_heads)
    value_heads = loader.even_section("linear_num_value_heads", tensors.num_value_heads)
    keys, values = times(key_heads, tensors.key_dim), times(value_heads, tensors.value_dim)
    channels, narrow = (keys, keys, values), tensors.narrow
    gates, decays, expand_gates, expand_decays = values, value_heads, None, None
    if narrow is not None:
        gates = decays = Section(narrow.size, 0, narrow.size)
        expand_gates = loader.by_outputs(narrow.gates, prefix, (values,), narrow.size)
        expand_decays = loader.by_outputs(narrow.decays, prefix, (keys,), narrow.size)
    conv_names = tuple(f"{prefix}{name}.weight" for name in tensors.conv.names)
    return GatedDeltaNet(
        inputs=loader.by_outputs(tensors.inputs, prefix, (*channels, gates, value_heads, decays), hidden_size),
        num_gates=gates.size,
        expand_gates=expand_gates,
        expand_decays=expand_decays,
        conv_weight_CW=loader.stacked_rows(
            conv_names if len(conv_names) > 1 else conv_names[0], channels, (1, tensors.conv.size)
        ),
        activation=tensors.activation,
        a_log_V=loader.of_heads(f"{prefix}{tensors.a_log}", value_heads, tensors.ones_of_a_log),
        dt_bias=loader.of_heads(f"{prefix}{tensors.dt_bias}", value_heads if narrow is None else keys),
        gate=tensors.gate,
        norm_weight=loader.vector(
            f"{prefix}{tensors.head_norm.name}.weight",
            tensors.value_dim,
            torch.float32 if tensors.norm_rounds_once else None,
        ),
        norm_eps=tensors.norm_eps,
        output=loader.by_inputs(tensors.output, prefix, hidden_size, values),
        num_key_heads=key_heads.size,
        num_value_heads=value_heads.size,
        key_dim=tensors.key_dim,
        value_dim=tensors.value_dim,
        dtype=loader.dtype,
    )
