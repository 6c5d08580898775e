"""Falcon-H1: in each layer attention and Mamba-2 beside each other on what one norm gives, and constant factors almost
everywhere."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import llama
from inflight.models.families.mamba import mamba_of_layers
from inflight.models.family import Family
from inflight.models.mixer_tensors import MambaMultipliers, MambaTensors
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs


def describe(config: ConfigValues) -> Family:
    """See Family."""
    family = llama.describe(config)
    gate_multiplier, down_multiplier = config.scales("mlp_multipliers", 2)
    attention = replace(
        family.attention,
        # Keys times a constant: scores are.
        scale=config.head_dim() ** -0.5 * config.scale("key_multiplier"),
        input_multiplier=config.scale("attention_in_multiplier"),
        output_multiplier=config.scale("attention_out_multiplier"),
    )
    mlp = replace(
        family.mlp,
        norm=NotSplit("pre_ff_layernorm"),
        gate_up=SplitByOutputs(("feed_forward.gate_proj", "feed_forward.up_proj"), bias=family.mlp.gate_up.bias),
        down=SplitByInputs("feed_forward.down_proj", bias=family.mlp.down.bias),
        gate_multiplier=gate_multiplier,
        output_multiplier=down_multiplier,
    )
    return replace(
        family,
        attention=attention,
        mlp=mlp,
        mixers=(_mamba(config),),
        attends_beside_mixers=True,
        norm=NotSplit("model.final_layernorm"),
        token_multiplier=config.scale("embedding_multiplier"),
        rounds_token_multiplier=False,
        logits_multiplier=config.scale("lm_head_multiplier"),
    )


def _mamba(config: ConfigValues) -> MambaTensors:
    mamba = mamba_of_layers(config, frozenset(range(config.whole("num_hidden_layers"))))
    of_input, sections = config.scale("ssm_in_multiplier"), config.scales("ssm_multipliers", 5)
    if not mamba.inputs.bias:
        # All that is made of an input that is multiplied is.
        of_input, sections = 1.0, [of_input * each for each in sections]
    gate, x, b, c, time = sections
    return replace(
        mamba,
        norm=mamba.norm if config.flag("mamba_rms_norm") else None,
        num_norm_groups=mamba.num_groups,
        gate_first=not config.flag("mamba_norm_before_gate"),
        multipliers=MambaMultipliers(input=of_input, gate=gate, x=x, b=b, c=c, time=time),
        output=replace(mamba.output, bias=config.flag("projectors_bias")),
        output_multiplier=config.scale("ssm_out_multiplier"),
    )
