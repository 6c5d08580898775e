"""Loads one rank's part of a Mamba-2 layer.

Ranks have equal shares of the heads, which follow each other as their groups do, and of the groups, or copies of the
one that all of a rank's heads are of.
"""

from __future__ import annotations

from torch import Tensor

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.mamba import Mamba
from inflight.layers.norm_parts import NormPart, NormParts
from inflight.layers.part import OfScaled, Part
from inflight.models.mixer_tensors import MambaTensors
from inflight.models.weights import Section, WeightLoader, times


def load_mamba(loader: WeightLoader, tensors: MambaTensors, prefix: str, hidden_size: int) -> Mamba:
    """Raises ConfigurationError if the ranks cannot have equal shares, or for tensors of other shapes."""
    heads = loader.even_section("Mamba heads", tensors.num_heads)
    groups = _groups_of_rank(loader, tensors.num_groups)
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
        norm_parts=_norm_parts(loader.group, tensors, values.num_features),
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


def _groups_of_rank(loader: WeightLoader, num_groups: int) -> Section:
    rank, size = loader.group.rank, loader.group.size
    if size % num_groups == 0:
        return Section(num_groups, rank * num_groups // size, 1)
    return loader.even_section("Mamba groups", num_groups)


def _norm_parts(group: TensorParallelGroup, tensors: MambaTensors, num_values: int) -> NormParts | None:
    """There are as many groups of elements that are normalised together as there are of heads, or one."""
    if tensors.norm is None or tensors.num_norm_groups % group.size == 0:
        return None
    ranks_of_group = group.size // tensors.num_norm_groups
    first = group.rank // ranks_of_group * ranks_of_group
    part = NormPart(range(first, first + ranks_of_group), num_values // tensors.num_norm_groups)
    return NormParts(group, (part,))
