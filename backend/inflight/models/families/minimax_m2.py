"""MiniMax-M2: norms of all heads together, a part of each head rotated, and experts of which sigmoids and a bias
choose."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.families.mixtral import with_experts
from inflight.models.family import ChoiceBias, Family
from inflight_kernels.moe.routing import Scores


def describe(config: ConfigValues) -> Family:
    """See Family."""
    family = with_experts(config, with_llamas_tensors(config, head_norms=True))
    assert family.experts is not None
    bias = ChoiceBias(("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"))
    return replace(
        family,
        attention=replace(family.attention, norms_all_heads=True),
        experts=replace(
            family.experts, choice_bias=bias, routing=replace(family.experts.routing, scores=Scores.SIGMOID)
        ),
        partial_rotary=True,
        rotary_dim=config.optional_whole("rotary_dim"),
    )
