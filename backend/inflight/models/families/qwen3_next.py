"""Qwen3-Next: most layers are Gated DeltaNets, the others attend with a gate; experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.families.qwen2_moe import experts_beside_a_shared_one, sparse_layers
from inflight.models.family import Family, NormStyle
from inflight.models.mixer_tensors import ConvTensors, DeltaNetTensors
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs

LINEAR = "linear_attention"
"""How `layer_types` calls layers that are Gated DeltaNets."""


def describe(config: ConfigValues) -> Family:
    """See Family."""
    of_keys, of_values = config.whole("linear_key_head_dim"), config.whole("linear_value_head_dim")
    sharing = config.whole("linear_num_value_heads") // config.whole("linear_num_key_heads")
    # Of each key head in turn: its query and key, and the values, gates, betas and decays of its value heads.
    inputs = SplitByOutputs(
        names=(*("linear_attn.in_proj_qkvz",) * 4, *("linear_attn.in_proj_ba",) * 2),
        alternating=(of_keys, of_keys, sharing * of_values, sharing * of_values, sharing, sharing),
    )
    experts = experts_beside_a_shared_one(config, sparse_layers(config), renormalize=config.flag("norm_topk_prob"))
    return replace(with_delta_nets(config, inputs), experts=experts)


def with_delta_nets(config: ConfigValues, inputs: SplitByOutputs) -> Family:
    """The description without experts, with these products before the convolutions of its DeltaNets."""
    num_key_heads, num_value_heads = config.whole("linear_num_key_heads"), config.whole("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise config.fault(
            f"linear_num_key_heads ({num_key_heads}) must divide linear_num_value_heads ({num_value_heads})"
        )
    bias = config.flag("attention_bias")
    family = with_llamas_tensors(
        config,
        norms=NormStyle(eps=config.eps("rms_norm_eps"), adds_one=True, rounds_once=True),
        output_bias=bias,
        head_norms=True,
    )
    attention = replace(
        family.attention,
        is_gated=True,
        qkv=SplitByOutputs(
            names=("self_attn.q_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            bias=bias,
            alternating=(config.head_dim(), config.head_dim(), 0, 0),
        ),
    )
    delta_net = DeltaNetTensors(
        layers=frozenset(layer for layer, kind in enumerate(config.texts("layer_types")) if kind == LINEAR),
        inputs=inputs,
        conv=ConvTensors(("linear_attn.conv1d",), config.whole("linear_conv_kernel_dim")),
        activation=config.activation("hidden_act"),
        a_log="linear_attn.A_log",
        dt_bias="linear_attn.dt_bias",
        head_norm=NotSplit("linear_attn.norm"),
        norm_eps=config.eps("rms_norm_eps"),
        output=SplitByInputs("linear_attn.out_proj"),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=config.whole("linear_key_head_dim"),
        value_dim=config.whole("linear_value_head_dim"),
    )
    return replace(family, attention=attention, mixers=(delta_net,), partial_rotary=True, unread=("mtp.",))
