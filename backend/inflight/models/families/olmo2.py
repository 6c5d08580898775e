"""OLMo 2: norms behind the branches instead of before them, and norms of all heads of queries and keys together."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors, with_norms_behind
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    bias = config.flag("attention_bias")
    family = with_norms_behind(with_llamas_tensors(config, qkv_bias=bias, output_bias=bias, head_norms=True))
    return replace(
        family,
        norms=replace(family.norms, rounds_once=True),
        attention=replace(family.attention, norms_all_heads=True),
    )
