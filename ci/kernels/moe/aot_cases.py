"""The router, the alignment and the grouped products of a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from ci.kernels.meta_tensors import of, show
from inflight_kernels.moe import gpu
from inflight_kernels.moe.gpu._moe_align import align
from inflight_kernels.moe.gpu.fused_moe import CANDIDATES, EXACT, LARGE, LARGE_HALF, MIDDLE, STREAM


class _Model(NamedTuple):
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int


QWEN3_30B = _Model(128, 2048, 768, 8)
MIXTRAL_8X7B = _Model(8, 4096, 14336, 2)


def _route(tokens: int, model: _Model, dtype: torch.dtype) -> None:
    gpu.route_experts(of(dtype, tokens, model.num_experts), model.top_k)


def _align(tokens: int, model: _Model, block_m: int) -> None:
    align(of(torch.int32, tokens, model.top_k), model.num_experts, block_m)


def _moe(
    tokens: int, model: _Model, dtype: torch.dtype = torch.bfloat16, config: Mapping[str, int] | None = None
) -> None:
    num_experts, hidden_size, intermediate_size, top_k = model
    gpu.fused_moe(
        of(dtype, tokens, hidden_size),
        of(torch.float32, tokens, top_k),
        of(torch.int32, tokens, top_k),
        of(dtype, num_experts, 2 * intermediate_size, hidden_size),
        of(dtype, num_experts, hidden_size, intermediate_size),
        config=config,
    )


CASES = {
    "route_experts e128 top8": partial(_route, 64, QWEN3_30B, torch.bfloat16),
    "route_experts e8 top2 fp32": partial(_route, 64, MIXTRAL_8X7B, torch.float32),
    "moe_align e128 t64": partial(_align, 64, QWEN3_30B, 16),
    "moe_align e128 t8192": partial(_align, 8192, QWEN3_30B, 128),
    "moe_align e8 t8192": partial(_align, 8192, MIXTRAL_8X7B, 128),
    "fused_moe e128 t1": partial(_moe, 1, QWEN3_30B),
    "fused_moe e128 t64 fp16": partial(_moe, 64, QWEN3_30B, torch.float16, STREAM),
    "fused_moe e128 t64 fp32": partial(_moe, 64, QWEN3_30B, torch.float32, EXACT),
    "fused_moe e8 t4": partial(_moe, 4, MIXTRAL_8X7B, torch.bfloat16, STREAM),
    "fused_moe e8 t256": partial(_moe, 256, MIXTRAL_8X7B, torch.bfloat16, MIDDLE),
    "fused_moe e8 t8192": partial(_moe, 8192, MIXTRAL_8X7B),
    # The second product's K is no multiple of its step.
    "fused_moe e60 t256": partial(_moe, 256, _Model(60, 2048, 1424, 4), torch.bfloat16, LARGE_HALF),
}
CASES |= {
    f"fused_moe e128 {show(config)}": partial(_moe, 8192, QWEN3_30B, torch.bfloat16, config) for config in CANDIDATES
}
# sm_80 would spill; its default for many rows is another.
NEEDS = {f"fused_moe e128 {show(LARGE)}": 90}
