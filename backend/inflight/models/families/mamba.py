"""Mamba-2 in networks of layers that attend and layers that do not: what Granite 4 and Bamba call its tensors."""

from __future__ import annotations

import math

from inflight.models.config_file import ConfigValues
from inflight.models.family import ConvTensors, MambaTensors, NotSplit, SplitByInputs, SplitByOutputs

LINEAR = "linear_attention"
"""How transformers' `layer_types` calls layers of Mamba-2."""


def mamba_of_layers(config: ConfigValues, layers: frozenset[int]) -> MambaTensors:
    """`layers`: numbers of those that have it."""
    num_heads, num_groups = config.whole("mamba_n_heads"), config.whole("mamba_n_groups")
    check_mamba(config, num_heads, num_groups)
    bias = config.flag("mamba_proj_bias")
    return MambaTensors(
        layers=layers,
        inputs=SplitByOutputs(("mamba.in_proj",), bias=bias),
        conv=ConvTensors("mamba.conv1d", config.whole("mamba_d_conv"), bias=config.flag("mamba_conv_bias")),
        activation=config.activation("hidden_act"),
        a_log="mamba.A_log",
        d="mamba.D",
        dt_bias="mamba.dt_bias",
        norm=NotSplit("mamba.norm"),
        norm_eps=config.eps("rms_norm_eps"),
        output=SplitByInputs("mamba.out_proj", bias=bias),
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=config.whole("mamba_d_head"),
        state_dim=config.whole("mamba_d_state"),
    )


def check_mamba(config: ConfigValues, num_heads: int, num_groups: int) -> None:
    """Raises ConfigurationError for groups that heads do not divide into, and NotNative for limits of time, which
    transformers has for prompts only."""
    if num_heads % num_groups:
        raise config.fault(f"{num_heads} Mamba heads do not divide into {num_groups} groups")
    limits = config.values.get("time_step_limit")
    if limits is not None and tuple(limits) != (0.0, math.inf):
        raise config.not_native("time_step_limit", "[0.0, Infinity]")
