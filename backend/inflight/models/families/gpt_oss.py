"""gpt-oss: attention with sinks, windows on every other layer, and experts with biases and a clamped activation."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import ExpertTensors, Family, StackedExperts
from inflight.models.split_tensors import NotSplit
from inflight_kernels import Activation
from inflight_kernels.moe.routing import Routing

EXPERTS = StackedExperts(
    router="mlp.router",
    gate_up="mlp.experts.gate_up_proj",
    down="mlp.experts.down_proj",
    is_transposed=True,
)


def describe(config: ConfigValues) -> Family:
    """See Family."""
    bias = config.flag("attention_bias")
    family = with_llamas_tensors(config, qkv_bias=bias, output_bias=bias)
    experts = ExpertTensors(
        layers=frozenset(range(config.whole("num_hidden_layers"))),
        num_experts=config.whole("num_local_experts"),
        # The softmax of the chosen experts' logits.
        routing=Routing(num_chosen=config.whole("num_experts_per_tok")),
        intermediate_size=config.whole("intermediate_size"),
        router=NotSplit(EXPERTS.router),
        router_bias=True,
        has_biases=True,
        activation=Activation.CLAMPED_SWIGLU,
        stacked=(EXPERTS,),
    )
    return replace(
        family,
        norms=replace(family.norms, rounds_once=True),
        attention=replace(family.attention, sinks=NotSplit("self_attn.sinks")),
        experts=experts,
        windowed_layers="layer_types",
    )
