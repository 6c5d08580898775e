"""GLM-4: adjacent elements of half a head are rotated; its later version has norms behind the branches too."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family
from inflight.models.split_tensors import NotSplit, SplitByOutputs


def describe(config: ConfigValues) -> Family:
    """See Family."""
    family = describe_first(config)
    return replace(
        family,
        attention=replace(family.attention, norm_after=NotSplit("post_self_attn_layernorm")),
        mlp=replace(family.mlp, norm_after=NotSplit("post_mlp_layernorm")),
    )


def describe_first(config: ConfigValues) -> Family:
    """Of the first version."""
    family = with_llamas_tensors(config, qkv_bias=config.flag("attention_bias"))
    return replace(
        family,
        attention=replace(family.attention, adjacent_pairs=True),
        mlp=replace(family.mlp, gate_up=SplitByOutputs(("mlp.gate_up_proj",))),
        partial_rotary=True,
    )
