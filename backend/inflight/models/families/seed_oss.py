"""Seed-OSS: Llama whose attention has biases before it and behind it by two options."""

from __future__ import annotations

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return with_llamas_tensors(
        config,
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_out_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )
