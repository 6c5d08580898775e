"""Bamba: layers of Mamba-2, and some that attend and rotate a part of each head."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import llama
from inflight.models.families.mamba import mamba_of_layers
from inflight.models.family import Family
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs


def describe(config: ConfigValues) -> Family:
    """See Family."""
    family = llama.describe(config)
    layers = frozenset(range(config.whole("num_hidden_layers"))) - config.whole_numbers("attn_layer_indices")
    mlp = replace(
        family.mlp,
        norm=NotSplit("pre_ff_layernorm"),
        gate_up=SplitByOutputs(("feed_forward.gate_proj", "feed_forward.up_proj"), bias=family.mlp.gate_up.bias),
        down=SplitByInputs("feed_forward.down_proj", bias=family.mlp.down.bias),
    )
    return replace(
        family,
        mlp=mlp,
        mixers=(mamba_of_layers(config, layers),),
        norm=NotSplit("model.final_layernorm"),
        partial_rotary=True,
    )
