"""Gemma 4, its text: two kinds of layers with heads of their own sizes, keys that several layers share, inputs of each
layer beside the residual stream, and experts beside the MLP."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import BesideMLP, ExpertTensors, Family, LayerInputTensors, StackedExperts
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary
from inflight_kernels.moe.routing import Routing

FULL = "full_attention"
EXPERTS = StackedExperts(router="router.proj", gate_up="experts.gate_up_proj", down="experts.down_proj")


def describe(config: ConfigValues) -> Family:
    """See Family."""
    if config.values.get("use_bidirectional_attention") not in (None, "vision"):
        raise config.not_native("use_bidirectional_attention", "null", "'vision'")
    bias = config.flag("attention_bias")
    family = with_llamas_tensors(
        config, qkv_bias=bias, output_bias=bias, head_norms=True, activation="hidden_activation"
    )
    key_layers = _key_layers(config)
    shared = frozenset(layer for layer, source in enumerate(key_layers) if source != layer)
    kinds = config.texts("layer_types")
    are_equal = config.flag("attention_k_eq_v")
    return replace(
        family,
        norms=replace(family.norms, rounds_once=True),
        attention=replace(
            family.attention,
            norm_after=NotSplit("post_attention_layernorm"),
            normalizes_values=True,
            scale=1.0,
        ),
        mlp=replace(
            family.mlp,
            norm=NotSplit("pre_feedforward_layernorm"),
            norm_after=NotSplit("post_feedforward_layernorm"),
            double_layers=shared if config.flag("use_double_wide_mlp") else frozenset(),
        ),
        heads_by_layer=True,
        key_layers=key_layers,
        layers_without_values=frozenset(layer for layer, kind in enumerate(kinds) if are_equal and kind == FULL),
        experts=_experts(config, family) if config.flag("enable_moe_block") else None,
        layer_inputs=_layer_inputs(config, family) if config.count("hidden_size_per_layer_input") else None,
        layer_scale="layer_scalar",
        windowed_layers="layer_types",
        token_multiplier=config.whole("hidden_size") ** 0.5,
        logits_soft_cap=config.soft_cap("final_logit_softcapping"),
    )


def _key_layers(config: ConfigValues) -> tuple[int, ...]:
    """The last layers attend to the keys of the last one before them that is of their type."""
    kinds, num_shared = config.texts("layer_types"), config.count("num_kv_shared_layers")
    if num_shared >= len(kinds):
        raise config.fault(f"num_kv_shared_layers ({num_shared}) must be less than num_hidden_layers ({len(kinds)})")
    num_own = len(kinds) - num_shared
    last = {kind: layer for layer, kind in enumerate(kinds[:num_own])}
    if missing := set(kinds) - last.keys():
        raise config.fault(
            f"num_kv_shared_layers is {num_shared}, but no earlier layer has keys for those of {', '.join(missing)}"
        )
    return tuple(layer if layer < num_own else last[kind] for layer, kind in enumerate(kinds))


def _layer_inputs(config: ConfigValues, family: Family) -> LayerInputTensors:
    vocab_size, num_tokens = config.whole("vocab_size_per_layer_input"), config.whole("vocab_size")
    if vocab_size < num_tokens:
        raise config.fault(f"vocab_size_per_layer_input ({vocab_size}) must be at least vocab_size ({num_tokens})")
    return LayerInputTensors(
        size=config.whole("hidden_size_per_layer_input"),
        vocab_size=vocab_size,
        table=SplitByVocabulary("model.embed_tokens_per_layer"),
        projection=SplitByOutputs(("model.per_layer_model_projection",)),
        norm=NotSplit("model.per_layer_projection_norm"),
        gate=SplitByOutputs(("per_layer_input_gate",)),
        activation=family.mlp.activation,
        output=SplitByInputs("per_layer_projection"),
        norm_after=NotSplit("post_per_layer_input_norm"),
    )


def _experts(config: ConfigValues, family: Family) -> ExpertTensors:
    return ExpertTensors(
        layers=frozenset(range(config.whole("num_hidden_layers"))),
        num_experts=config.whole("num_experts"),
        routing=Routing(num_chosen=config.whole("top_k_experts")),
        intermediate_size=config.whole("moe_intermediate_size"),
        router=NotSplit(EXPERTS.router),
        experts="experts",
        stacked=(EXPERTS,),
        activation=family.mlp.activation,
        beside=BesideMLP(
            norm=NotSplit("pre_feedforward_layernorm_2"),
            norm_after=NotSplit("post_feedforward_layernorm_2"),
            mlp_norm_after=NotSplit("post_feedforward_layernorm_1"),
            router_scale="router.scale",
            factors="router.per_expert_scale",
        ),
    )
