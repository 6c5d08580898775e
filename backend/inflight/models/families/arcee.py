"""Arcee: Llama with a feed-forward without a gate."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import llama
from inflight.models.family import Family
from inflight.models.split_tensors import SplitByOutputs


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return without_gate(llama.describe(config), bias=config.flag("mlp_bias"))


def without_gate(family: Family, *, bias: bool) -> Family:
    """The same with Llama's feed-forward but for the gate."""
    return replace(family, mlp=replace(family.mlp, gate_up=SplitByOutputs(("mlp.up_proj",), bias=bias), is_gated=False))
