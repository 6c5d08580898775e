"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without positions, or a feed-forward without a gate or
experts without one beside a shared one, behind its norm."""

from __future__ import annotations

from inflight.models.config_file import ConfigValues
from inflight.models.families.mamba import LINEAR, heads_and_groups, time_limits
from inflight.models.family import (
    AttentionTensors,
    ChoiceBias,
    ExpertTensors,
    Family,
    MLPTensors,
    NarrowExperts,
    NormStyle,
    SharedExpertTensors,
    StackedExperts,
)
from inflight.models.mixer_tensors import ConvTensors, MambaTensors
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary
from inflight_kernels.moe.routing import GroupScore, Routing, Scores

FEED_FORWARD, EXPERTS = "mlp", "moe"
"""How transformers calls types of layers."""
NORM = NotSplit("norm")


def describe(config: ConfigValues) -> Family:
    """See Family."""
    kinds = config.texts("layers_block_type")
    layers = {kind: frozenset(layer for layer, its in enumerate(kinds) if its == kind) for kind in set(kinds)}
    with_experts, mlp_bias = layers.get(EXPERTS, frozenset()), config.flag("mlp_bias")
    feed_forwards = layers.get(FEED_FORWARD, frozenset()) | with_experts
    return Family(
        embedding=SplitByVocabulary("backbone.embeddings"),
        layers="backbone.layers",
        norms=NormStyle(eps=config.eps("layer_norm_epsilon")),
        attention=AttentionTensors(
            norm=NORM,
            qkv=SplitByOutputs(("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")),
            output=SplitByInputs("mixer.o_proj"),
        ),
        mlp=MLPTensors(
            norm=NORM,
            gate_up=SplitByOutputs(("mixer.up_proj",), bias=mlp_bias),
            down=SplitByInputs("mixer.down_proj", bias=mlp_bias),
            is_gated=False,
            activation=config.activation("mlp_hidden_act"),
        ),
        norm=NotSplit("backbone.norm_f"),
        head=SplitByVocabulary("lm_head"),
        has_own_head=True,
        mixers=(_mamba(config, layers.get(LINEAR, frozenset())),),
        mixing_layers=frozenset(range(len(kinds))) - feed_forwards,
        feed_forward_layers=feed_forwards,
        experts=_experts(config, with_experts, bias=mlp_bias) if with_experts else None,
        rotated_layers=frozenset(),
        unread=("mtp.",),
    )


def _experts(config: ConfigValues, layers: frozenset[int], *, bias: bool) -> ExpertTensors:
    """`bias`: of the shared ones, and of the products around narrow ones."""
    narrow_size = config.optional_whole("moe_latent_size")
    narrow = None
    if narrow_size is not None:
        narrow = NarrowExperts(
            size=narrow_size,
            inputs=SplitByOutputs(("mixer.fc1_latent_proj",), bias=bias),
            output=SplitByInputs("mixer.fc2_latent_proj", bias=bias),
        )
    return ExpertTensors(
        layers=layers,
        num_experts=config.whole("n_routed_experts", "num_local_experts"),
        routing=Routing(
            num_chosen=config.whole("num_experts_per_tok"),
            scores=Scores.SIGMOID,
            renormalize=config.flag("norm_topk_prob"),
            scale=config.scale("routed_scaling_factor"),
            num_groups=config.whole("n_group"),
            num_chosen_groups=config.whole("topk_group"),
            group_score=GroupScore.TOP2_SUM,
        ),
        intermediate_size=config.whole("moe_intermediate_size"),
        router=NotSplit("mixer.gate"),
        choice_bias=ChoiceBias(("mixer.gate.e_score_correction_bias",)),
        experts="mixer.experts",
        gate=None,
        stacked=(StackedExperts(router="mixer.gate", gate_up="mixer.experts.up_proj", down="mixer.experts.down_proj"),),
        activation=config.activation("mlp_hidden_act"),
        shared=SharedExpertTensors(
            gate_up=SplitByOutputs(("mixer.shared_experts.up_proj",), bias=bias),
            down=SplitByInputs("mixer.shared_experts.down_proj", bias=bias),
            intermediate_size=config.whole("moe_shared_expert_intermediate_size"),
        ),
        narrow=narrow,
    )


def _mamba(config: ConfigValues, layers: frozenset[int]) -> MambaTensors:
    """Of transformers `time_step_min` limits the steps of time of prompts, where the published code has
    `time_step_limit`, which this has too."""
    num_heads, num_groups = heads_and_groups(config, "mamba_num_heads", "n_groups")
    bias = config.flag("use_bias")
    return MambaTensors(
        layers=layers,
        inputs=SplitByOutputs(("mixer.in_proj",), bias=bias),
        conv=ConvTensors(("mixer.conv1d",), config.whole("conv_kernel"), bias=config.flag("use_conv_bias")),
        activation=config.activation("mamba_hidden_act"),
        a_log="mixer.A_log",
        d="mixer.D",
        dt_bias="mixer.dt_bias",
        norm=NotSplit("mixer.norm"),
        norm_eps=config.eps("layer_norm_epsilon"),
        num_norm_groups=num_groups,
        output=SplitByInputs("mixer.out_proj", bias=bias),
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=config.whole("mamba_head_dim"),
        state_dim=config.whole("ssm_state_size"),
        time_limits=time_limits(config),
    )
