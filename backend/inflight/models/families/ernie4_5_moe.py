"""ERNIE 4.5 with experts: a softmax and a bias choose them, beside shared ones, in layers that config.json gives."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import ernie4_5
from inflight.models.family import ChoiceBias, ExpertTensors, Family, SharedExpertTensors
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs, SplitByVocabulary
from inflight_kernels.moe.routing import Routing


def describe(config: ConfigValues) -> Family:
    """See Family."""
    num_layers, every = config.whole("num_hidden_layers"), config.whole("moe_layer_interval")
    # transformers has the number of the last layer in the place of -1.
    first, last = config.count("moe_layer_start_index"), config.count("moe_layer_end_index")
    intermediate_size, num_shared = config.whole("moe_intermediate_size"), config.count("moe_num_shared_experts")
    bias = config.flag("use_bias")
    shared = SharedExpertTensors(
        gate_up=SplitByOutputs(("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), bias=bias),
        down=SplitByInputs("mlp.shared_experts.down_proj", bias=bias),
        intermediate_size=intermediate_size * num_shared,
    )
    experts = ExpertTensors(
        layers=frozenset(range(every - 1, num_layers, every)) & frozenset(range(first, last + 1)),
        num_experts=config.whole("moe_num_experts", "num_experts"),
        routing=Routing(num_chosen=config.whole("moe_k", "num_experts_per_tok")),
        intermediate_size=intermediate_size,
        activation=config.activation("hidden_act"),
        router=NotSplit("mlp.gate"),
        choice_bias=ChoiceBias(
            ("mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias"), is_row=True
        ),
        shared=shared if num_shared else None,
    )
    head = SplitByVocabulary("lm_head", bias=bias)
    return replace(ernie4_5.describe(config), experts=experts, head=head)
