"""StarCoder2: LayerNorm, and a feed-forward without a gate."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family, NormStyle
from inflight.models.split_tensors import SplitByInputs, SplitByOutputs


def describe(config: ConfigValues) -> Family:
    """See Family."""
    bias = config.flag("use_bias")
    norms = NormStyle(eps=config.eps("norm_epsilon"), centers=True, bias=True)
    family = with_llamas_tensors(config, norms=norms, qkv_bias=bias, output_bias=bias)
    mlp = replace(
        family.mlp,
        gate_up=SplitByOutputs(("mlp.c_fc",), bias=bias),
        down=SplitByInputs("mlp.c_proj", bias=bias),
        is_gated=False,
    )
    return replace(family, mlp=mlp, windowed_layers="all")
