"""DeepSeek-V3, and Kimi K2 under its name: attention to latents, and behind the first layers experts of which sigmoids
and a bias choose, beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import (
    ChoiceBias,
    ExpertTensors,
    Family,
    LatentSizes,
    LatentTensors,
    NarrowQueries,
    NormStyle,
    SharedExpertTensors,
)
from inflight.models.split_tensors import NotSplit, SplitByInputs, SplitByOutputs
from inflight_kernels.moe.routing import GroupScore, Routing, Scores

NORM_EPS = 1e-6
"""Of queries and latents, whatever rms_norm_eps is: transformers and the published code have no option for it."""


def describe(config: ConfigValues) -> Family:
    """See Family."""
    layers = frozenset(range(config.count("first_k_dense_replace"), config.whole("num_hidden_layers")))
    return with_latents_and_experts(config, layers, adjacent_pairs=config.flag("rope_interleave"))


def with_latents_and_experts(config: ConfigValues, layers: frozenset[int], *, adjacent_pairs: bool) -> Family:
    """`layers`: those with experts."""
    family = with_latents(config, adjacent_pairs=adjacent_pairs)
    routing = Routing(
        num_chosen=config.whole("num_experts_per_tok"),
        scores=Scores.SIGMOID,
        renormalize=config.flag("norm_topk_prob"),
        scale=config.scale("routed_scaling_factor"),
        num_groups=config.whole("n_group"),
        num_chosen_groups=config.whole("topk_group"),
        group_score=GroupScore.TOP2_SUM,
    )
    experts = shared_and_routed(config, layers, routing)
    bias = ChoiceBias(("mlp.gate.e_score_correction_bias",))
    return replace(
        family,
        experts=replace(experts, choice_bias=bias),
        num_extra_layers=config.count("num_nextn_predict_layers", "num_mtp_layers"),
    )


def with_latents(config: ConfigValues, *, adjacent_pairs: bool, mlp_bias: bool = False) -> Family:
    """A network whose attention is to latents."""
    bias, narrow_size = config.flag("attention_bias"), config.optional_whole("q_lora_rank")
    if bias and narrow_size is None:
        # Queries have none then, and are computed together with latents, which have.
        raise config.not_native("attention_bias", "false without q_lora_rank")
    queries, narrow = "self_attn.q_proj", None
    if narrow_size is not None:
        queries = "self_attn.q_a_proj"
        narrow = NarrowQueries(
            size=narrow_size,
            norm=NotSplit("self_attn.q_a_layernorm"),
            queries=SplitByOutputs(("self_attn.q_b_proj",)),
        )
    latents = LatentTensors(
        sizes=LatentSizes(
            plain=config.whole("qk_nope_head_dim"),
            rotated=config.whole("qk_rope_head_dim"),
            latent=config.whole("kv_lora_rank"),
            value=config.whole("v_head_dim"),
        ),
        norm=NotSplit("self_attn.kv_a_layernorm"),
        keys_and_values="self_attn.kv_b_proj",
        narrow_queries=narrow,
        norms=NormStyle(eps=NORM_EPS),
    )
    family = with_llamas_tensors(config, output_bias=bias, mlp_bias=mlp_bias)
    attention = replace(
        family.attention,
        qkv=SplitByOutputs((queries, "self_attn.kv_a_proj_with_mqa"), bias=bias),
        latents=latents,
        adjacent_pairs=adjacent_pairs,
    )
    return replace(family, attention=attention)


def shared_and_routed(
    config: ConfigValues, layers: frozenset[int], routing: Routing, *, bias: bool = False
) -> ExpertTensors:
    """The experts of these `layers`. `bias`: of the shared ones."""
    intermediate_size = config.whole("moe_intermediate_size")
    shared = SharedExpertTensors(
        gate_up=SplitByOutputs(("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), bias=bias),
        down=SplitByInputs("mlp.shared_experts.down_proj", bias=bias),
        intermediate_size=intermediate_size * config.whole("n_shared_experts"),
    )
    return ExpertTensors(
        layers=layers,
        num_experts=config.whole("n_routed_experts", "num_local_experts", "num_experts"),
        routing=routing,
        intermediate_size=intermediate_size,
        activation=config.activation("hidden_act"),
        router=NotSplit("mlp.gate"),
        shared=shared,
    )
