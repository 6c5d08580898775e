"""ERNIE 4.5: Llama in which adjacent elements of a head are rotated."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    bias = config.flag("use_bias")
    family = with_llamas_tensors(config, qkv_bias=bias, output_bias=bias, mlp_bias=bias)
    return replace(family, attention=replace(family.attention, adjacent_pairs=True))
