"""Qwen1.5 and Qwen2 with experts: a mixture of experts, and a shared one with a gate, in those of Qwen2's layers that
config.json does not except."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.families.qwen2 import windowed_layers
from inflight.models.family import ExpertTensors, Family, SharedExpertTensors
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs
from inflight_kernels.moe.routing import Routing


def describe(config: ConfigValues) -> Family:
    """See Family."""
    tensors = with_llamas_tensors(config, qkv_bias=config.flag("qkv_bias"))
    experts = experts_beside_a_shared_one(config, sparse_layers(config), renormalize=config.flag("norm_topk_prob"))
    return replace(tensors, experts=experts, windowed_layers=windowed_layers(config))


def sparse_layers(config: ConfigValues) -> frozenset[int]:
    """Numbers of the layers with experts."""
    every, dense = config.whole("decoder_sparse_step"), config.whole_numbers("mlp_only_layers")
    return frozenset(range(every - 1, config.whole("num_hidden_layers"), every)) - dense


def experts_beside_a_shared_one(config: ConfigValues, layers: frozenset[int], *, renormalize: bool) -> ExpertTensors:
    """`layers`: numbers of those that have experts. `renormalize`: see Routing."""
    return ExpertTensors(
        layers=layers,
        num_experts=config.whole("num_experts"),
        routing=Routing(
            num_chosen=config.whole("num_experts_per_tok"),
            renormalize=renormalize,
        ),
        intermediate_size=config.whole("moe_intermediate_size"),
        activation=config.activation("hidden_act"),
        router=NotSplit("mlp.gate"),
        shared=SharedExpertTensors(
            gate_up=SplitByOutputs(("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")),
            down=SplitByInputs("mlp.shared_expert.down_proj"),
            intermediate_size=config.whole("shared_expert_intermediate_size"),
            gate=NotSplit("mlp.shared_expert_gate"),
        ),
    )
