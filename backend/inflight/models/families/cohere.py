"""Cohere: LayerNorm without biases, both branches of a layer in parallel, adjacent elements of heads rotated."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family, NormStyle


def describe(config: ConfigValues) -> Family:
    """See Family."""
    if config.flag("use_qk_norm"):
        raise config.not_native("use_qk_norm", "false")
    bias = config.flag("attention_bias")
    norms = NormStyle(eps=config.eps("layer_norm_eps"), centers=True)
    family = with_llamas_tensors(config, norms=norms, qkv_bias=bias, output_bias=bias)
    return replace(
        family,
        attention=replace(family.attention, adjacent_pairs=True),
        mlp=replace(family.mlp, norm=None),
        is_parallel=True,
        logits_multiplier=config.scale("logit_scale"),
    )
