"""Mixtral: Mistral with a mixture of experts in each layer."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import mistral
from inflight.models.family import ExpertTensors, Family
from inflight.models.split_tensors import NotSplit
from inflight_kernels.moe.routing import Routing


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return with_experts(config, mistral.describe(config))


def with_experts(config: ConfigValues, family: Family) -> Family:
    """The same with experts under Mixtral's names in each layer."""
    experts = ExpertTensors(
        layers=frozenset(range(config.whole("num_hidden_layers"))),
        num_experts=config.whole("num_local_experts"),
        routing=Routing(num_chosen=config.whole("num_experts_per_tok")),
        intermediate_size=config.whole("intermediate_size"),
        activation=config.activation("hidden_act"),
        router=NotSplit("block_sparse_moe.gate"),
        experts="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
    )
    return replace(family, experts=experts)
