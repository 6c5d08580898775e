"""The router, the alignment and the grouped products of a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from ci.kernels.meta_tensors import of, show
from inflight_kernels import BlockScaledWeight
from inflight_kernels.activation.kinds import Activation
from inflight_kernels.moe import gpu
from inflight_kernels.moe.gpu._moe_align import align
from inflight_kernels.moe.gpu.fused_moe import BLOCKS_CANDIDATES, CANDIDATES, EXACT, LARGE, LARGE_HALF, MIDDLE, STREAM
from inflight_kernels.moe.routing import GroupScore, Routing, Scores


class _Model(NamedTuple):
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int


QWEN3_30B = _Model(128, 2048, 768, 8)
MIXTRAL_8X7B = _Model(8, 4096, 14336, 2)


GPT_OSS_20B = _Model(32, 2880, 2880, 4)


def _route(
    tokens: int,
    model: _Model,
    dtype: torch.dtype,
    routing: Routing | None = None,
    has_bias: bool = False,
    has_factors: bool = False,
) -> None:
    bias, factors = (of(torch.float32, model.num_experts) if has else None for has in (has_bias, has_factors))
    gpu.route_experts(of(dtype, tokens, model.num_experts), routing or Routing(num_chosen=model.top_k), bias, factors)


def _align(tokens: int, model: _Model, block_m: int) -> None:
    align(of(torch.int32, tokens, model.top_k), model.num_experts, block_m)


def _moe(
    tokens: int,
    model: _Model,
    dtype: torch.dtype = torch.bfloat16,
    config: Mapping[str, int] | None = None,
    has_biases: bool = False,
    activation: Activation = Activation.SILU,
    is_gated: bool = True,
) -> None:
    num_experts, hidden_size, intermediate_size, top_k = model
    gpu.fused_moe(
        of(dtype, tokens, hidden_size),
        of(torch.float32, tokens, top_k),
        of(torch.int32, tokens, top_k),
        of(dtype, num_experts, (2 if is_gated else 1) * intermediate_size, hidden_size),
        of(dtype, num_experts, hidden_size, intermediate_size),
        gate_up_bias=of(dtype, num_experts, 2 * intermediate_size) if has_biases else None,
        down_bias=of(dtype, num_experts, hidden_size) if has_biases else None,
        activation=activation,
        config=config,
    )


def _moe_by_blocks(tokens: int, model: _Model, config: Mapping[str, int] | None = None) -> None:
    num_experts, hidden_size, intermediate_size, top_k = model

    def blocks(num_outputs: int, num_inputs: int) -> BlockScaledWeight:
        values = of(torch.float8_e4m3fn, num_experts, num_outputs, num_inputs)
        return BlockScaledWeight(values, of(torch.float32, num_experts, num_outputs // 128, num_inputs // 128), 128)

    gpu.fused_moe(
        of(torch.bfloat16, tokens, hidden_size),
        of(torch.float32, tokens, top_k),
        of(torch.int32, tokens, top_k),
        blocks(2 * intermediate_size, hidden_size),
        blocks(hidden_size, intermediate_size),
        config=config,
    )


def _gpt_oss(tokens: int) -> None:
    _moe(tokens, GPT_OSS_20B, has_biases=True, activation=Activation.CLAMPED_SWIGLU)


def _nemotron_3_nano(tokens: int) -> None:
    _moe(tokens, _Model(128, 2688, 1856, 6), activation=Activation.RELU_SQUARED, is_gated=False)


GLM_4_5 = Routing(num_chosen=8, scores=Scores.SIGMOID)
DEEPSEEK_V2 = Routing(num_chosen=6, renormalize=False, scale=16.0, num_groups=8, num_chosen_groups=3)
DEEPSEEK_V3 = Routing(
    num_chosen=8,
    scores=Scores.SIGMOID,
    scale=2.5,
    num_groups=8,
    num_chosen_groups=4,
    group_score=GroupScore.TOP2_SUM,
)
CASES = {
    "route_experts e128 top8": partial(_route, 64, QWEN3_30B, torch.bfloat16),
    "route_experts e128 top8 factors": partial(_route, 64, QWEN3_30B, torch.bfloat16, has_factors=True),
    "route_experts e8 top2 fp32": partial(_route, 64, MIXTRAL_8X7B, torch.float32),
    "route_experts e128 top8 sigmoids bias": partial(_route, 64, QWEN3_30B, torch.bfloat16, GLM_4_5, True),
    "route_experts e160 top6 groups": partial(_route, 64, _Model(160, 5120, 1536, 6), torch.bfloat16, DEEPSEEK_V2),
    "route_experts e256 top8 sigmoids groups bias": partial(
        _route, 64, _Model(256, 7168, 2048, 8), torch.bfloat16, DEEPSEEK_V3, True
    ),
    "moe_align e128 t64": partial(_align, 64, QWEN3_30B, 16),
    "moe_align e128 t8192": partial(_align, 8192, QWEN3_30B, 128),
    "moe_align e8 t8192": partial(_align, 8192, MIXTRAL_8X7B, 128),
    "fused_moe e128 t1": partial(_moe, 1, QWEN3_30B),
    "fused_moe e128 t64 fp16": partial(_moe, 64, QWEN3_30B, torch.float16, STREAM),
    "fused_moe e128 t64 fp32": partial(_moe, 64, QWEN3_30B, torch.float32, EXACT),
    "fused_moe e8 t4": partial(_moe, 4, MIXTRAL_8X7B, torch.bfloat16, STREAM),
    "fused_moe e8 t256": partial(_moe, 256, MIXTRAL_8X7B, torch.bfloat16, MIDDLE),
    "fused_moe e8 t8192": partial(_moe, 8192, MIXTRAL_8X7B),
    "fused_moe e32 t1 biases clamped": partial(_gpt_oss, 1),
    "fused_moe e32 t64 biases clamped": partial(_gpt_oss, 64),
    "fused_moe e32 t8192 biases clamped": partial(_gpt_oss, 8192),
    "fused_moe e128 t1 without gates": partial(_nemotron_3_nano, 1),
    "fused_moe e128 t8192 without gates": partial(_nemotron_3_nano, 8192),
    # The second product's K is no multiple of its step.
    "fused_moe e60 t256": partial(_moe, 256, _Model(60, 2048, 1424, 4), torch.bfloat16, LARGE_HALF),
}
CASES |= {
    f"fused_moe e128 {show(config)}": partial(_moe, 8192, QWEN3_30B, torch.bfloat16, config) for config in CANDIDATES
}
BY_BLOCKS = {
    "fused_moe fp8 blocks e128 t1": partial(_moe_by_blocks, 1, QWEN3_30B),
    "fused_moe fp8 blocks e8 t8192": partial(_moe_by_blocks, 8192, MIXTRAL_8X7B),
    **{
        f"fused_moe fp8 blocks e128 {show(config)}": partial(_moe_by_blocks, 8192, QWEN3_30B, config)
        for config in BLOCKS_CANDIDATES
    },
}
CASES |= BY_BLOCKS
# sm_80 would spill; its default for many rows is another.
NEEDS = {f"fused_moe e128 {show(LARGE)}": 90, **dict.fromkeys(BY_BLOCKS, 89)}
