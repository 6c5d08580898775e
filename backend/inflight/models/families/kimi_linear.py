"""Kimi-Linear: most layers are Kimi Delta Attention, in which each row of a head's state decays by itself, the others
attend to latents without positions; behind the first layers experts as DeepSeek-V3's."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.deepseek_v3 import with_latents_and_experts
from inflight.models.families.qwen3_next import LINEAR
from inflight.models.family import ChoiceBias, Family
from inflight.models.mixer_tensors import ConvTensors, DeltaNetTensors, NarrowGates
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs
from inflight_kernels.recurrent.gate import Gate


def describe(config: ConfigValues) -> Family:
    """See Family."""
    with_experts = frozenset(number for number, kind in enumerate(config.texts("mlp_layer_types")) if kind == "sparse")
    family = with_latents_and_experts(config, with_experts, adjacent_pairs=False)
    assert family.experts is not None and family.experts.shared is not None
    shared = replace(
        family.experts.shared,
        gate_up=SplitByOutputs(
            ("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj")
        ),
        down=SplitByInputs("block_sparse_moe.shared_experts.down_proj"),
    )
    experts = replace(
        family.experts,
        router=NotSplit("block_sparse_moe.gate"),
        choice_bias=ChoiceBias(("block_sparse_moe.gate.e_score_correction_bias",)),
        experts="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
        shared=shared,
    )
    return replace(
        family,
        # transformers gives dense feed-forwards the names of experts when it saves.
        mlp=replace(family.mlp, respelt=("mlp.", "block_sparse_moe.")),
        mixers=(_delta_attention(config),),
        experts=experts,
        rotated_layers=frozenset(),
        has_own_head=True,
    )


def _delta_attention(config: ConfigValues) -> DeltaNetTensors:
    num_heads, head_dim = config.whole("linear_num_heads"), config.whole("linear_head_dim")
    inputs = ("q_proj", "k_proj", "v_proj", "g_a_proj", "b_proj", "f_a_proj")
    return DeltaNetTensors(
        layers=frozenset(layer for layer, kind in enumerate(config.texts("layer_types")) if kind == LINEAR),
        inputs=SplitByOutputs(tuple(f"self_attn.{name}" for name in inputs)),
        narrow=NarrowGates(
            size=head_dim,
            gates=SplitByOutputs(("self_attn.g_b_proj",)),
            decays=SplitByOutputs(("self_attn.f_b_proj",)),
        ),
        conv=ConvTensors(tuple(f"self_attn.{name}_conv1d" for name in "qkv"), config.whole("linear_conv_kernel_dim")),
        activation=config.activation("hidden_act"),
        a_log="self_attn.A_log",
        ones_of_a_log=(2, 1),
        dt_bias="self_attn.dt_bias",
        gate=Gate.SIGMOID,
        head_norm=NotSplit("self_attn.o_norm"),
        norm_rounds_once=True,
        norm_eps=config.eps("rms_norm_eps"),
        output=SplitByInputs("self_attn.o_proj"),
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
    )
