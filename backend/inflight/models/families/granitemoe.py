"""Granite 3 with experts: Granite with a mixture of experts in each layer, all experts of which are stacked."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import granite
from inflight.models.family import ExpertTensors, Family, StackedExperts
from inflight.models.split_tensors import NotSplit
from inflight_kernels.moe.routing import Routing

PUBLISHED = StackedExperts(
    router="block_sparse_moe.router.layer",
    gate_up="block_sparse_moe.input_linear.weight",
    down="block_sparse_moe.output_linear.weight",
)
OF_TRANSFORMERS = StackedExperts(
    router="block_sparse_moe.router",
    gate_up="block_sparse_moe.experts.gate_up_proj",
    down="block_sparse_moe.experts.down_proj",
)
"""With `save_original_format=False`."""


def describe(config: ConfigValues) -> Family:
    """See Family."""
    experts = ExpertTensors(
        layers=frozenset(range(config.whole("num_hidden_layers"))),
        num_experts=config.whole("num_local_experts"),
        routing=Routing(num_chosen=config.whole("num_experts_per_tok")),
        intermediate_size=config.whole("intermediate_size"),
        activation=config.activation("hidden_act"),
        router=NotSplit(PUBLISHED.router),
        stacked=(PUBLISHED, OF_TRANSFORMERS),
    )
    return replace(granite.describe(config), experts=experts)
