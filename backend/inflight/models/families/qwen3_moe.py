"""Qwen3 with experts: those of Qwen3's layers that config.json does not except have a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import qwen3
from inflight.models.family import ExpertTensors, Family
from inflight.models.split_tensors import NotSplit
from inflight_kernels.moe.routing import Routing


def describe(config: ConfigValues) -> Family:
    """See Family."""
    every = config.whole("decoder_sparse_step")
    dense = config.whole_numbers("mlp_only_layers")
    experts = ExpertTensors(
        layers=frozenset(range(every - 1, config.whole("num_hidden_layers"), every)) - dense,
        # Versions of transformers write either.
        num_experts=config.whole("num_experts", "num_local_experts"),
        routing=Routing(num_chosen=config.whole("num_experts_per_tok"), renormalize=config.flag("norm_topk_prob")),
        intermediate_size=config.whole("moe_intermediate_size"),
        activation=config.activation("hidden_act"),
        router=NotSplit("mlp.gate"),
    )
    # transformers leaves out sliding_window where use_sliding_window is false.
    return replace(qwen3.describe(config), experts=experts, windowed_layers="all")
