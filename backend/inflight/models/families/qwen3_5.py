"""Qwen3.5 and 3.6, their text: Qwen3-Next with a product for each input of a DeltaNet, dense or with experts."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.qwen2_moe import experts_beside_a_shared_one
from inflight.models.families.qwen3_next import with_delta_nets
from inflight.models.family import Family
from inflight.models.split_tensors import SplitByOutputs

INPUTS = SplitByOutputs(
    names=(
        *("linear_attn.in_proj_qkv",) * 3,
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )
)


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return with_delta_nets(config, INPUTS)


def describe_moe(config: ConfigValues) -> Family:
    """The same with experts in every layer."""
    family, layers = describe(config), frozenset(range(config.whole("num_hidden_layers")))
    experts = experts_beside_a_shared_one(config, layers, renormalize=True)
    return replace(family, mlp=replace(family.mlp, intermediate_size=experts.intermediate_size), experts=experts)
