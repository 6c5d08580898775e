"""Qwen1.5 and Qwen2 with experts: a mixture of experts, and a shared one with a gate, in those of Qwen2's layers that
config.json does not except."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.families.qwen2 import windowed_layers
from inflight.models.family import ExpertTensors, Family, NotSplit, SharedExpertTensors, SplitByInputs, SplitByOutputs
from inflight_kernels.moe.routing import Routing


def describe(config: ConfigValues) -> Family:
    """See Family."""
    every = config.whole("decoder_sparse_step")
    dense = config.whole_numbers("mlp_only_layers")
    experts = ExpertTensors(
        layers=frozenset(range(every - 1, config.whole("num_hidden_layers"), every)) - dense,
        num_experts=config.whole("num_experts"),
        routing=Routing(
            num_chosen=config.whole("num_experts_per_tok"),
            renormalize=config.flag("norm_topk_prob"),
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
    tensors = with_llamas_tensors(config, qkv_bias=config.flag("qkv_bias"))
    return replace(tensors, experts=experts, windowed_layers=windowed_layers(config))
