"""The linear layer of fp8 weights with a scale for each block of outputs and inputs, as DeepSeek and Qwen publish them.

    y[m, n] = round(sum_g (sum_{k in g} W[n, k] x[m, k]) * (weight_scale[n / B, g] * x_scale[m, g]) + bias[n])

x (T, K) is quantised per token and group g of 128 inputs, W (N, K) per block of B outputs and 128 inputs, both
float8_e4m3fn. A tile is always one group deep: what the matrix unit adds up of it is multiplied by both scales and
added to a float32 register, so that the unit's 14 bits (`_linear_kernels`) are of 128 products at most. Product and sum
are one fused operation by name, or variants of the kernel might be contracted in different ways and differ in bits.
Scales are loaded in the pipeline of the tiles: waiting for a load in every tile would cost more than everything else.

Bytes: N K + 4 N K / (128 B) + T K + 4 T K / 128 + 2 T N for a 16-bit result; operations: 2 T N K, and 2 T N K / 128
outside of the matrix unit. On an H200 at 4.3 TB/s and 1,500 TFLOP/s the lower bounds are those of `scaled_linear`.

`_linear_kernels` describes tiles, splits of K and in which order their sums are added.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import (
    FLOAT_DTYPES,
    cdiv,
    check_dtype,
    check_shape,
    compute_capability,
    multiprocessor_count,
    next_power_of_2,
)
from inflight_kernels.common.last_program import is_last_program
from inflight_kernels.matmul.gpu._linear_kernels import (
    grouped_tile,
    plan_splits,
    store_partial,
    store_tile,
    sum_partials,
)
from inflight_kernels.matmul.gpu.linear import check_operands, needs_small_tiles, wanted_splits
from inflight_kernels.matmul.gpu.scaled_linear import FP8_CAPABILITY
from inflight_kernels.matmul.weight_formats import BLOCK_INPUTS, BlockScaledWeight
from inflight_kernels.tuning import tuned

# What the tuning script tries, the last for prompts. A tile is always one group of 128 inputs deep.
CANDIDATES: tuple[Mapping[str, int], ...] = tuple(
    dict(BLOCK_M=m, BLOCK_N=n, NUM_SPLITS=splits, GROUP_N=8, num_warps=warps, num_stages=stages)
    for m, n, splits, warps, stages in (
        (16, 64, 1, 4, 6),
        (16, 64, 2, 4, 6),
        (64, 64, 2, 4, 5),
        (64, 128, 4, 8, 4),
        (64, 128, 1, 8, 4),
        (128, 128, 1, 8, 4),
    )
)


@triton.jit
def block_segment_sum(
    x_ptrs,
    weight_ptrs,
    x_scale_ptrs,
    weight_scale_ptrs,
    first_group,
    end_group,
    in_features,
    offs_k,
    mask_m,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum of W[n, k] x[m, k], scaled, over the inputs of groups [first_group, end_group), as (BLOCK_N, BLOCK_M)."""
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    # With a number of stages of its own a loop's pipeline has also loads that no product reads: the scales.
    for group in tl.range(first_group, end_group, num_stages=STAGES):
        start = group * BLOCK_K
        if EVEN_K:
            weight = tl.load(weight_ptrs + start)
            x = tl.load(x_ptrs + start, mask=mask_m[None, :], other=0.0)
        else:
            mask_k = start + offs_k < in_features
            weight = tl.load(weight_ptrs + start, mask=mask_k[None, :], other=0.0)
            x = tl.load(x_ptrs + start, mask=mask_k[:, None] & mask_m[None, :], other=0.0)
        weight_scale = tl.load(weight_scale_ptrs + group)
        x_scale = tl.load(x_scale_ptrs + group, mask=mask_m, other=0.0)
        product = tl.dot(weight, x, out_dtype=tl.float32)
        acc = tl.fma(product, weight_scale[:, None] * x_scale[None, :], acc)
    return acc


@triton.jit
def block_scaled_linear_kernel(
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    counters_ptr,
    num_tokens,
    out_features,
    in_features,
    block_outputs,
    num_groups,
    stride_x,
    stride_weight,
    stride_y,
    split_groups,
    HAS_BIAS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PER_PROGRAM: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid_s = tl.program_id(1)
    num_tiles_n = tl.cdiv(out_features, BLOCK_N)
    pid_n, pid_m = grouped_tile(tl.program_id(0), num_tiles_n, tl.cdiv(num_tokens, BLOCK_M), GROUP_N)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < num_tokens
    # Rows past the last one read the last row again and are not stored, so that the loads of weights need no mask.
    rows = tl.minimum(offs_n, out_features - 1)
    weight_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * stride_weight + offs_k[None, :]
    x_ptrs = x_ptr + offs_m[None, :].to(tl.int64) * stride_x + offs_k[:, None]
    weight_scale_ptrs = weight_scale_ptr + (rows // block_outputs).to(tl.int64) * num_groups
    x_scale_ptrs = x_scale_ptr + offs_m.to(tl.int64) * num_groups

    if SPLITS_PER_PROGRAM == 1:
        first_group = pid_s * split_groups
        total = block_segment_sum(
            x_ptrs, weight_ptrs, x_scale_ptrs, weight_scale_ptrs,
            first_group, tl.minimum(first_group + split_groups, num_groups), in_features, offs_k, mask_m,
            EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    else:
        total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for split in tl.range(0, SPLITS_PER_PROGRAM):
            first_group = split * split_groups
            total += block_segment_sum(
                x_ptrs, weight_ptrs, x_scale_ptrs, weight_scale_ptrs,
                first_group, tl.minimum(first_group + split_groups, num_groups), in_features, offs_k, mask_m,
                EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
    if SPLITS_PER_PROGRAM < NUM_SPLITS:
        store_partial(total, partial_ptr, pid_s, offs_n, offs_m, num_tokens, out_features)
        if not is_last_program(counters_ptr + tl.program_id(0), NUM_SPLITS):
            return
        total = sum_partials(partial_ptr, offs_n, offs_m, num_tokens, out_features, NUM_SPLITS, BLOCK_M, BLOCK_N)
    store_tile(
        total, x_scale_ptr, weight_scale_ptr, bias_ptr, y_ptr, offs_n, offs_m,
        num_tokens, out_features, stride_y, False, HAS_BIAS,
    )  # fmt: skip


def default_config(num_tokens: int, out_features: int, in_features: int, device: torch.device) -> dict[str, int]:
    """The launch without a tuned table: tiles as in `scaled_linear`, for the reasons given there, but one group deep.
    Not measured yet.

    Tiles of 64 rows have six stages, which keep 40 KiB of weights in flight.
    """
    if num_tokens > 64:
        block_m, block_n, warps, stages = 128, 128, 8, 4
    else:
        block_m = min(max(next_power_of_2(num_tokens), 16), 64)
        block_n, warps, stages = (64, 4, 6) if block_m < 64 else (128, 8, 4)
    if needs_small_tiles(in_features, 1):
        block_m, block_n, warps, stages = min(block_m, 32), 32, 4, 3
    # Of the next power of two, so that no number of tokens between two of them needs a kernel of its own.
    tiles = cdiv(out_features, block_n) * cdiv(next_power_of_2(num_tokens), block_m)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "NUM_SPLITS": min(wanted_splits(tiles, multiprocessor_count(device)), most_splits(in_features)),
        "GROUP_N": 8,
        "num_warps": warps,
        "num_stages": stages,
    }


def deterministic_config(out_features: int, in_features: int) -> dict[str, int]:
    """The configuration of a weight for every batch: it depends on the weight's shape only, not on the device.

    Eight warps, because three sums are in registers at once: the matrix unit's, the split's and the total.
    """
    block_m, block_n, warps = (32, 32, 4) if needs_small_tiles(in_features, 1) else (64, 128, 8)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "NUM_SPLITS": min(wanted_splits(cdiv(out_features, block_n), 132), most_splits(in_features)),
        "GROUP_N": 8,
        "num_warps": warps,
        "num_stages": 4,
    }


def most_splits(in_features: int) -> int:
    """Splits of at least four groups each."""
    return max(in_features // (4 * BLOCK_INPUTS), 1)


def check_scales(name: str, scales: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `scales` is contiguous of `shape` and float32."""
    check_dtype(name, scales, torch.float32)
    check_shape(name, scales, shape)
    if not scales.is_contiguous():
        raise ValueError(f"{name} must be contiguous, its strides are {scales.stride()}")


def check_block_weight(name: str, weight: BlockScaledWeight) -> None:
    """Raise ValueError unless types and shapes of `weight` (..., N, K) fit each other and its device multiplies fp8."""
    check_dtype(name, weight.values, torch.float8_e4m3fn)
    capability = compute_capability(weight.values.device)
    if capability < FP8_CAPABILITY:
        raise ValueError(
            f"fp8 products need a GPU of compute capability 8.9 or newer, this one has {capability // 10}."
            f"{capability % 10}"
        )
    if weight.block_outputs < 1:
        raise ValueError(f"block_outputs of {name} must be a positive number, got {weight.block_outputs}")
    *several, num_outputs, num_inputs = weight.shape
    num_blocks, num_groups = cdiv(num_outputs, weight.block_outputs), cdiv(num_inputs, BLOCK_INPUTS)
    check_scales(f"the scales of {name}", weight.scales, (*several, num_blocks, num_groups))


def _check(
    x: Tensor,
    x_scale: Tensor,
    weight: BlockScaledWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    check_dtype("x", x, torch.float8_e4m3fn)
    check_block_weight("weight", weight)
    check_operands(x, weight.values, bias)
    check_scales("x_scale", x_scale, (x.shape[0], cdiv(x.shape[1], BLOCK_INPUTS)))
    if out_dtype not in FLOAT_DTYPES:
        raise ValueError(f"out_dtype must be float32, float16 or bfloat16, got {out_dtype}")


def block_scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: BlockScaledWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch the layer; see `inflight_kernels.block_scaled_linear`. `config` overrides every choice."""
    _check(x, x_scale, weight, bias, out_dtype)
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    y = torch.empty((num_tokens, out_features), dtype=out_dtype, device=x.device)
    if num_tokens == 0 or out_features == 0:
        return y
    if config is None and deterministic:
        config = deterministic_config(out_features, in_features)
    elif config is None:
        default = default_config(num_tokens, out_features, in_features, x.device)
        rows = min(max(next_power_of_2(num_tokens), 16), 8192)
        shape = {"m": str(rows), "n": out_features, "k": in_features}
        config = tuned("block_scaled_linear", shape, default, x.device)
    num_groups = cdiv(in_features, BLOCK_INPUTS)
    num_tiles = cdiv(out_features, config["BLOCK_N"]) * cdiv(num_tokens, config["BLOCK_M"])
    splits = plan_splits(num_groups, config["NUM_SPLITS"], num_tiles, y, deterministic)
    block_scaled_linear_kernel[(num_tiles, splits.count // splits.in_program)](
        x,
        weight.values,
        x_scale,
        weight.scales,
        y if bias is None else bias,
        y,
        splits.partial,
        splits.arrived,
        num_tokens,
        out_features,
        in_features,
        weight.block_outputs,
        num_groups,
        x.stride(0),
        weight.values.stride(0),
        y.stride(0),
        splits.size,
        HAS_BIAS=bias is not None,
        NUM_SPLITS=splits.count,
        SPLITS_PER_PROGRAM=splits.in_program,
        EVEN_K=in_features % BLOCK_INPUTS == 0,
        BLOCK_M=config["BLOCK_M"],
        BLOCK_N=config["BLOCK_N"],
        BLOCK_K=BLOCK_INPUTS,
        GROUP_N=config["GROUP_N"],
        STAGES=config["num_stages"],
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    return y
