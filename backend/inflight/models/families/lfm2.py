"""LFM2: most layers are short convolutions between gates, the others attend with norms on heads; dense or, behind the
first layers, with experts of which sigmoids and a bias choose."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import ChoiceBias, ExpertTensors, Family, MLPTensors, NormStyle, StackedExperts
from inflight.models.mixer_tensors import ConvTensors, ShortConvTensors
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs
from inflight_kernels.moe.routing import Routing, Scores

CONVOLUTION = "conv"
"""How `layer_types` calls layers that do not attend."""


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return _of_feed_forwards(config, _intermediate_size(config))


def describe_moe(config: ConfigValues) -> Family:
    """The same with experts in all layers but the first."""
    experts = ExpertTensors(
        layers=frozenset(range(config.count("num_dense_layers"), config.whole("num_hidden_layers"))),
        num_experts=config.whole("num_experts"),
        routing=Routing(
            num_chosen=config.whole("num_experts_per_tok"),
            scores=Scores.SIGMOID,
            renormalize=config.flag("norm_topk_prob"),
            epsilon=1e-6,
            scale=config.scale("routed_scaling_factor"),
        ),
        intermediate_size=config.whole("moe_intermediate_size"),
        router=NotSplit("feed_forward.gate"),
        choice_bias=ChoiceBias(("feed_forward.expert_bias",)) if config.flag("use_expert_bias") else None,
        experts="feed_forward.experts",
        gate="w1",
        up="w3",
        down="w2",
        stacked=(
            StackedExperts(
                router="feed_forward.gate",
                gate_up="feed_forward.experts.gate_up_proj",
                down="feed_forward.experts.down_proj",
            ),
        ),
    )
    return replace(_of_feed_forwards(config, config.whole("intermediate_size")), experts=experts)


def _of_feed_forwards(config: ConfigValues, intermediate_size: int) -> Family:
    """The description without experts."""
    bias = config.flag("conv_bias")
    convolutions = ShortConvTensors(
        layers=frozenset(layer for layer, kind in enumerate(config.texts("layer_types")) if kind == CONVOLUTION),
        inputs=SplitByOutputs(("conv.in_proj",), bias=bias),
        conv=ConvTensors(("conv.conv",), config.whole("conv_L_cache"), bias=bias),
        output=SplitByInputs("conv.out_proj", bias=bias),
    )
    family = with_llamas_tensors(config, norms=NormStyle(eps=config.eps("norm_eps")))
    attention = replace(
        family.attention,
        norm=NotSplit("operator_norm"),
        q_norm=NotSplit("self_attn.q_layernorm"),
        k_norm=NotSplit("self_attn.k_layernorm"),
        output=SplitByInputs("self_attn.out_proj"),
    )
    mlp = MLPTensors(
        norm=NotSplit("ffn_norm"),
        gate_up=SplitByOutputs(("feed_forward.w1", "feed_forward.w3")),
        down=SplitByInputs("feed_forward.w2"),
        intermediate_size=intermediate_size,
    )
    return replace(family, attention=attention, mlp=mlp, mixers=(convolutions,), norm=NotSplit("model.embedding_norm"))


def _intermediate_size(config: ConfigValues) -> int:
    """Two thirds of what config.json says, times a factor, as a multiple; or what it says."""
    size = config.whole("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    multiple = config.whole("block_multiple_of")
    size = int(config.scale("block_ffn_dim_multiplier") * int(2 * size / 3))
    return -(-size // multiple) * multiple
