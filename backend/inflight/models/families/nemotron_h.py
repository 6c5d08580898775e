"""Nemotron-H: each layer is Mamba-2, attention without positions, or a feed-forward without a gate, behind its norm."""

from __future__ import annotations

from inflight.models.config_file import ConfigValues, NotNative
from inflight.models.families.mamba import LINEAR, heads_and_groups, time_limits
from inflight.models.family import (
    AttentionTensors,
    ConvTensors,
    Family,
    MambaTensors,
    MLPTensors,
    NormStyle,
    NotSplit,
    SplitByInputs,
    SplitByOutputs,
    SplitByVocabulary,
)

FEED_FORWARD, EXPERTS = "mlp", "moe"
"""How transformers calls types of layers."""
NORM = NotSplit("norm")


def describe(config: ConfigValues) -> Family:
    """See Family."""
    kinds = config.texts("layers_block_type")
    if EXPERTS in kinds:
        raise NotNative(f"{config.path}: experts without a gate are not supported")
    layers = {kind: frozenset(layer for layer, its in enumerate(kinds) if its == kind) for kind in set(kinds)}
    feed_forwards, mlp_bias = layers.get(FEED_FORWARD, frozenset()), config.flag("mlp_bias")
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
        mixers=(_mamba(config, layers.get(LINEAR, frozenset())),),
        mixing_layers=frozenset(range(len(kinds))) - feed_forwards,
        feed_forward_layers=feed_forwards,
        rotated_layers=frozenset(),
    )


def _mamba(config: ConfigValues, layers: frozenset[int]) -> MambaTensors:
    """Of transformers `time_step_min` limits the steps of time of prompts, where the published code has
    `time_step_limit`, which this has too."""
    num_heads, num_groups = heads_and_groups(config, "mamba_num_heads", "n_groups")
    bias = config.flag("use_bias")
    return MambaTensors(
        layers=layers,
        inputs=SplitByOutputs(("mixer.in_proj",), bias=bias),
        conv=ConvTensors("mixer.conv1d", config.whole("conv_kernel"), bias=config.flag("use_conv_bias")),
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
