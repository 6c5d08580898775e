"""Mamba-2 in networks of layers that attend and layers that do not: what Granite 4 and Bamba call its tensors."""

from __future__ import annotations

import math
import reprlib

from inflight.models.config_file import ConfigValues
from inflight.models.mixer_tensors import ConvTensors, MambaTensors
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs

LINEAR = "linear_attention"
"""How transformers' `layer_types` calls layers of Mamba-2."""


def mamba_of_layers(config: ConfigValues, layers: frozenset[int]) -> MambaTensors:
    """`layers`: numbers of those that have it."""
    num_heads, num_groups = heads_and_groups(config, "mamba_n_heads", "mamba_n_groups")
    bias = config.flag("mamba_proj_bias")
    return MambaTensors(
        layers=layers,
        inputs=SplitByOutputs(("mamba.in_proj",), bias=bias),
        conv=ConvTensors(("mamba.conv1d",), config.whole("mamba_d_conv"), bias=config.flag("mamba_conv_bias")),
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
        time_limits=time_limits(config),
    )


def heads_and_groups(config: ConfigValues, heads: str, groups: str) -> tuple[int, int]:
    """How many there are under these keys. Raises ConfigurationError for heads that do not divide into groups."""
    num_heads, num_groups = config.whole(heads), config.whole(groups)
    if num_heads % num_groups:
        raise config.fault(f"{num_heads} Mamba heads do not divide into {num_groups} groups")
    return num_heads, num_groups


def time_limits(config: ConfigValues) -> tuple[float, float]:
    """Of every token's step of time, of prompts and answers alike, as training has them: transformers limits those of
    prompts alone. `time_step_min` and the like are none: new weights begin within them."""
    limits = config.values.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    are_numbers = isinstance(limits, list | tuple) and all(type(limit) in (int, float) for limit in limits)
    if not are_numbers or len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise config.fault(
            f"time_step_limit must be two numbers from 0, the larger one last, got {reprlib.repr(limits)}"
        )
    return float(limits[0]), float(limits[1])
