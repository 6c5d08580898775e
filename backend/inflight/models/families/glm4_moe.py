"""GLM-4.5 to 4.7: Llama with partly rotated heads and, behind the first layers, experts of which sigmoids and a bias
choose, beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import ChoiceBias, ExpertTensors, Family, SharedExpertTensors
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs
from inflight_kernels.moe.routing import GroupScore, Routing, Scores


def describe(config: ConfigValues) -> Family:
    """See Family."""
    intermediate_size = config.whole("moe_intermediate_size")
    experts = ExpertTensors(
        layers=frozenset(range(config.count("first_k_dense_replace"), config.whole("num_hidden_layers"))),
        num_experts=config.whole("n_routed_experts", "num_local_experts"),
        routing=Routing(
            num_chosen=config.whole("num_experts_per_tok"),
            scores=Scores.SIGMOID,
            renormalize=config.flag("norm_topk_prob"),
            scale=config.scale("routed_scaling_factor"),
            num_groups=config.whole("n_group"),
            num_chosen_groups=config.whole("topk_group"),
            group_score=GroupScore.TOP2_SUM,
        ),
        intermediate_size=intermediate_size,
        activation=config.activation("hidden_act"),
        router=NotSplit("mlp.gate"),
        choice_bias=ChoiceBias(("mlp.gate.e_score_correction_bias",)),
        shared=SharedExpertTensors(
            gate_up=SplitByOutputs(("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")),
            down=SplitByInputs("mlp.shared_experts.down_proj"),
            intermediate_size=intermediate_size * config.whole("n_shared_experts"),
        ),
    )
    tensors = with_llamas_tensors(config, qkv_bias=config.flag("attention_bias"), head_norms=config.flag("use_qk_norm"))
    extra_layers = config.count("num_nextn_predict_layers", "num_mtp_layers")
    return replace(tensors, experts=experts, partial_rotary=True, num_extra_layers=extra_layers)
