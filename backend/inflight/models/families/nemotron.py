"""Nemotron: LayerNorm with weights less 1, a feed-forward without a gate, a part of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.arcee import without_gate
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family, NormStyle


def describe(config: ConfigValues) -> Family:
    """See Family."""
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    norms = NormStyle(eps=config.eps("norm_eps"), centers=True, bias=True, adds_one=True)
    family = with_llamas_tensors(config, norms=norms, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
    return replace(without_gate(family, bias=mlp_bias), partial_rotary=True)
