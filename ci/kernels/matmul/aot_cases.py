"""The linear layers: floats, fp8 and int8, 4 bits; every candidate at a Llama-8B shape, and the modes beside them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ci.kernels.meta_tensors import of, show
from inflight_kernels import Activation, BlockScaledWeight, Int4Weight
from inflight_kernels.matmul import gpu
from inflight_kernels.matmul.gpu.block_scaled_linear import CANDIDATES as BLOCK_CANDIDATES
from inflight_kernels.matmul.gpu.gated_linear import CANDIDATES as GATED_CANDIDATES
from inflight_kernels.matmul.gpu.head_linear import CANDIDATES as HEAD_CANDIDATES
from inflight_kernels.matmul.gpu.int4_linear import CANDIDATES as INT4_CANDIDATES
from inflight_kernels.matmul.gpu.linear import CANDIDATES
from inflight_kernels.matmul.gpu.scaled_linear import CANDIDATES as SCALED_CANDIDATES

HIDDEN = 4096
SHORT = {torch.float8_e4m3fn: "fp8", torch.int8: "int8", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _linear(
    dtype: torch.dtype,
    num_tokens: int,
    in_features: int = HIDDEN,
    with_bias: bool = False,
    deterministic: bool = False,
    config: Mapping[str, int] | None = None,
) -> None:
    weight = of(dtype, HIDDEN, in_features)
    bias = of(dtype, HIDDEN) if with_bias else None
    gpu.linear(of(dtype, num_tokens, in_features), weight, bias, deterministic, config)


def _scaled(
    dtype: torch.dtype,
    num_tokens: int,
    in_features: int = HIDDEN,
    with_bias: bool = False,
    deterministic: bool = False,
    config: Mapping[str, int] | None = None,
) -> None:
    x, weight = of(dtype, num_tokens, in_features), of(dtype, HIDDEN, in_features)
    x_scale, weight_scale = of(torch.float32, num_tokens), of(torch.float32, HIDDEN)
    bias = of(torch.bfloat16, HIDDEN) if with_bias else None
    gpu.scaled_linear(x, x_scale, weight, weight_scale, bias, torch.bfloat16, deterministic, config)


def _block_scaled(
    num_tokens: int,
    in_features: int = HIDDEN,
    with_bias: bool = False,
    deterministic: bool = False,
    config: Mapping[str, int] | None = None,
) -> None:
    num_groups = -(-in_features // 128)
    weight = BlockScaledWeight(of(FP8, HIDDEN, in_features), of(FP32, HIDDEN // 128, num_groups), 128)
    x, x_scale = of(FP8, num_tokens, in_features), of(FP32, num_tokens, num_groups)
    bias = of(BF16, HIDDEN) if with_bias else None
    gpu.block_scaled_linear(x, x_scale, weight, bias, BF16, deterministic, config)


def _int4(
    dtype: torch.dtype,
    num_tokens: int,
    group_size: int = 128,
    with_bias: bool = False,
    deterministic: bool = False,
    config: Mapping[str, int] | None = None,
) -> None:
    qweight = of(torch.int16, HIDDEN // 128, HIDDEN, 32)
    weight = Int4Weight(qweight, of(torch.int32, HIDDEN // group_size, HIDDEN), dtype, HIDDEN)
    bias = of(dtype, HIDDEN) if with_bias else None
    gpu.int4_linear(of(dtype, num_tokens, HIDDEN), weight, bias, deterministic, config)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def _gated(
    dtype: torch.dtype,
    num_tokens: int,
    config: Mapping[str, int] | None = None,
    deterministic: bool = False,
    activation: Activation = Activation.SILU,
) -> None:
    x, weight = of(dtype, num_tokens, HIDDEN), of(dtype, 2 * HIDDEN, HIDDEN)
    gpu.gated_linear(x, weight, None, deterministic, activation, config)


def _heads(
    dtype: torch.dtype, num_tokens: int, num_outputs: int, num_inputs: int, config: Mapping[str, int] | None = None
) -> None:
    """Queries of DeepSeek-V3's heads, or values."""
    x, weight = of(dtype, num_tokens, 128, num_inputs + 64)[..., :num_inputs], of(dtype, 128, num_outputs, num_inputs)
    gpu.head_linear(x, weight, of(dtype, num_tokens, 128, num_outputs + 64)[..., :num_outputs], config=config)


CASES = {
    "head_linear bf16 t1 128 to 512": partial(_heads, BF16, 1, 512, 128),
    "head_linear bf16 t2048 128 to 512": partial(_heads, BF16, 2048, 512, 128),
    "head_linear bf16 t64 512 to 128": partial(_heads, BF16, 64, 128, 512),
    "head_linear fp32 t64 128 to 512": partial(_heads, FP32, 64, 512, 128),
    **{f"head_linear bf16 {show(c)}": partial(_heads, BF16, c["BLOCK_M"], 512, 128, c) for c in HEAD_CANDIDATES},
    **{f"gated_linear bf16 {show(c)}": partial(_gated, BF16, c["BLOCK_M"], c) for c in GATED_CANDIDATES},
    **{
        f"gated_linear bf16 {each.value}": partial(_gated, BF16, 16, GATED_CANDIDATES[1], activation=each)
        for each in Activation
        if each is not Activation.SILU
    },
    "gated_linear bf16 t1 deterministic": partial(_gated, BF16, 1, deterministic=True),
    "gated_linear bf16 t2048 deterministic": partial(_gated, BF16, 2048, deterministic=True),
    **{f"linear bf16 {show(c)}": partial(_linear, BF16, c["BLOCK_M"], config=c) for c in CANDIDATES},
    "linear fp16 t16 bias": partial(_linear, FP16, 16, with_bias=True, config=CANDIDATES[1]),
    "linear bf16 t16 k4112": partial(_linear, BF16, 16, in_features=4112, config=CANDIDATES[1]),
    "linear fp32 t1 deterministic": partial(_linear, FP32, 1, deterministic=True),
    "linear bf16 t1 k4100 deterministic": partial(_linear, BF16, 1, in_features=4100, deterministic=True),
    "linear bf16 t1 deterministic": partial(_linear, BF16, 1, deterministic=True),
    "linear bf16 t2048 deterministic": partial(_linear, BF16, 2048, deterministic=True),
    **{
        f"linear {SHORT[dtype]} {show(c)}": partial(_scaled, dtype, c["BLOCK_M"], config=c)
        for dtype in (FP8, INT8)
        for c in SCALED_CANDIDATES
    },
    "linear int8 t16 bias": partial(_scaled, INT8, 16, with_bias=True),
    "linear fp8 t16 k4112": partial(_scaled, FP8, 16, in_features=4112),
    "linear fp8 t2048 k4100": partial(_scaled, FP8, 2048, in_features=4100),
    "linear fp8 t1 deterministic": partial(_scaled, FP8, 1, deterministic=True),
    "linear fp8 t2048 deterministic": partial(_scaled, FP8, 2048, deterministic=True),
    **{f"linear fp8 blocks {show(c)}": partial(_block_scaled, c["BLOCK_M"], config=c) for c in BLOCK_CANDIDATES},
    "linear fp8 blocks t16 bias": partial(_block_scaled, 16, with_bias=True),
    "linear fp8 blocks t2048": partial(_block_scaled, 2048),
    "linear fp8 blocks t16 k4112": partial(_block_scaled, 16, in_features=4112),
    "linear fp8 blocks t2048 k4100": partial(_block_scaled, 2048, in_features=4100),
    "linear fp8 blocks t1 deterministic": partial(_block_scaled, 1, deterministic=True),
    "linear fp8 blocks t2048 deterministic": partial(_block_scaled, 2048, deterministic=True),
    **{f"linear int4 {show(c)}": partial(_int4, BF16, c["BLOCK_M"], config=c) for c in INT4_CANDIDATES},
    "linear int4 fp16 t16 bias": partial(_int4, FP16, 16, with_bias=True),
    "linear int4 bf16 t16 g32": partial(_int4, BF16, 16, group_size=32),
    "linear int4 bf16 t1 deterministic": partial(_int4, BF16, 1, deterministic=True),
    "linear int4 bf16 t2048 deterministic": partial(_int4, BF16, 2048, deterministic=True),
}
NEEDS = {name: 89 for name in CASES if name.startswith("linear fp8")}
