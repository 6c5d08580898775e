"""Phi-1, 1.5 and 2: LayerNorm, both branches of a layer in parallel, biases everywhere, a part of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family, NormStyle
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary


def describe(config: ConfigValues) -> Family:
    """See Family."""
    if config.flag("qk_layernorm"):
        raise config.not_native("qk_layernorm", "false")
    norms = NormStyle(eps=config.eps("layer_norm_eps"), centers=True, bias=True)
    family = with_llamas_tensors(config, norms=norms, qkv_bias=True)
    return replace(
        family,
        attention=replace(family.attention, output=SplitByInputs("self_attn.dense", bias=True)),
        mlp=replace(
            family.mlp,
            norm=None,
            gate_up=SplitByOutputs(("mlp.fc1",), bias=True),
            down=SplitByInputs("mlp.fc2", bias=True),
            is_gated=False,
        ),
        is_parallel=True,
        norm=NotSplit("model.final_layernorm"),
        head=SplitByVocabulary("lm_head", bias=True),
        partial_rotary=True,
    )
