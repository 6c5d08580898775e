"""DeepSeek-V2: attention to latents, and behind the first layers experts that a softmax chooses, of all or of the best
groups, beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.deepseek_v3 import shared_and_routed, with_latents
from inflight.models.family import Family
from inflight_kernels.moe.routing import Routing


def describe(config: ConfigValues) -> Family:
    """See Family."""
    has_groups = config.values.get("topk_method") == "group_limited_greedy"
    if not has_groups and config.values.get("topk_method") != "greedy":
        raise config.not_native("topk_method", "greedy", "group_limited_greedy")
    routing = Routing(
        num_chosen=config.whole("num_experts_per_tok"),
        # Whatever norm_topk_prob is, which is false in what is published: transformers does not read it.
        renormalize=False,
        scale=config.scale("routed_scaling_factor"),
        num_groups=config.whole("n_group") if has_groups else 1,
        num_chosen_groups=config.whole("topk_group") if has_groups else 1,
    )
    layers = frozenset(range(config.count("first_k_dense_replace"), config.whole("num_hidden_layers")))
    bias = config.flag("mlp_bias")
    family = with_latents(config, adjacent_pairs=True, mlp_bias=bias)
    return replace(family, experts=shared_and_routed(config, layers, routing, bias=bias))
