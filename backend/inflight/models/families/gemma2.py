"""Gemma 2: norms before and behind each branch, scores and logits with a soft cap, windows on every other layer."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family
from inflight.models.split_tensors import NotSplit


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return with_gemmas_tensors(config)


def with_gemmas_tensors(config: ConfigValues, *, head_norms: bool = False) -> Family:
    """The description of a network with the tensors of Gemma 2. `head_norms`: as of Llama's."""
    if config.flag("use_bidirectional_attention"):
        raise config.not_native("use_bidirectional_attention", "false")
    bias = config.flag("attention_bias")
    family = with_llamas_tensors(
        config, qkv_bias=bias, output_bias=bias, head_norms=head_norms, activation="hidden_activation"
    )
    return replace(
        family,
        norms=replace(family.norms, adds_one=True, rounds_once=True),
        attention=replace(
            family.attention,
            norm_after=NotSplit("post_attention_layernorm"),
            scale=config.scale("query_pre_attn_scalar") ** -0.5,
            soft_cap=config.soft_cap("attn_logit_softcapping"),
        ),
        mlp=replace(
            family.mlp,
            norm=NotSplit("pre_feedforward_layernorm"),
            norm_after=NotSplit("post_feedforward_layernorm"),
        ),
        windowed_layers="layer_types",
        token_multiplier=config.whole("hidden_size") ** 0.5,
        logits_soft_cap=config.soft_cap("final_logit_softcapping"),
    )
