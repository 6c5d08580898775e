"""Code shared by the linear layers of float, fp8 and int8: the tile kernel, the sum over splits of K, and the launch.

    y[m, n] = (sum_k W[n, k] x[m, k]) * weight_scale[n] * x_scale[m] + bias[n]

The operands are swapped: rows of the weight are the M dimension of the matrix instruction, which is 64, and tokens are
its N dimension, which may be as small as 16, so that a decode batch does not pay for 128 tokens. A program of a gated
layer computes two tiles, one of the gate and the one of up that belongs to it. K is divided into NUM_SPLITS segments of
whole tiles, and the result is the sum of the segments' sums, added in order:

    SPLITS_PER_PROGRAM == 1            a program computes one segment; with more than one segment its sum goes to
                                       scratch (NUM_SPLITS, T, N), and the tile's last program adds them
    SPLITS_PER_PROGRAM == NUM_SPLITS   a program computes all segments and adds them itself

Both add the same numbers in the same order, and no float is added atomically: for one tile shape and one NUM_SPLITS a
row's result is bitwise the same in both variants and at every place in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.common.activations import gated
from inflight_kernels.common.checks import cdiv
from inflight_kernels.common.last_program import NUM_COUNTERS, counters, is_last_program

# From this many tiles on, a program computes and sums all splits itself: the tiles alone fill the GPU. Not measured
# yet.
TILES_THAT_FILL = 132


@triton.jit
def grouped_tile(pid, num_tiles_n, num_tiles_m, GROUP_N: tl.constexpr):
    """The tile (pid_n, pid_m) of a program. Programs first process all tokens with a group of GROUP_N tiles of weight
    rows, then the next group, so that both operands stay in the L2 cache. With one tile of tokens pid_n = pid."""
    per_group = GROUP_N * num_tiles_m
    first_n = (pid // per_group) * GROUP_N
    group_n = tl.minimum(num_tiles_n - first_n, GROUP_N)
    inside = pid % per_group
    return first_n + inside % group_n, inside // group_n


@triton.jit
def finish(total, weight_scale, x_scale, bias, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The epilogue, in float32."""
    y = total.to(tl.float32)
    if HAS_SCALE:
        y = y * weight_scale * x_scale
    if HAS_BIAS:
        y = y + bias
    return y


@triton.jit
def store_tile(
    total,
    x_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    y_ptr,
    offs_n,
    offs_m,
    num_tokens,
    out_features,
    stride_y,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Apply the epilogue to a (BLOCK_N, BLOCK_M) tile and store it as y[m, n]."""
    mask_n = offs_n < out_features
    mask_m = offs_m < num_tokens
    weight_scale = 1.0
    x_scale = 1.0
    bias = 0.0
    if HAS_SCALE:
        weight_scale = tl.load(weight_scale_ptr + offs_n, mask=mask_n, other=0.0)[:, None]
        x_scale = tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    y = finish(total, weight_scale, x_scale, bias, HAS_SCALE, HAS_BIAS)
    y_ptrs = y_ptr + offs_m[None, :].to(tl.int64) * stride_y + offs_n[:, None]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit
def store_gated_tile(
    gate,
    up,
    bias_ptr,
    y_ptr,
    offs_n,
    offs_m,
    num_tokens,
    out_features,
    stride_y,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store f(gate) * up of two (BLOCK_N, BLOCK_M) tiles; rounds as the linear layer and the activation do."""
    dtype = y_ptr.dtype.element_ty
    mask_n = offs_n < out_features
    bias_of_gate = 0.0
    bias_of_up = 0.0
    if HAS_BIAS:
        bias_of_gate = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        bias_of_up = tl.load(bias_ptr + out_features + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    gate = finish(gate, 1.0, 1.0, bias_of_gate, False, HAS_BIAS).to(dtype).to(tl.float32)
    up = finish(up, 1.0, 1.0, bias_of_up, False, HAS_BIAS).to(dtype).to(tl.float32)
    y = gated(gate, up, dtype, ACTIVATION)
    y_ptrs = y_ptr + offs_m[None, :].to(tl.int64) * stride_y + offs_n[:, None]
    tl.store(y_ptrs, y.to(dtype), mask=mask_n[:, None] & (offs_m < num_tokens)[None, :])


@triton.jit
def store_partial(total, partial_ptr, pid_s, offs_n, offs_m, num_tokens, out_features):
    """Store one segment's (BLOCK_N, BLOCK_M) sum as partial[pid_s, m, n]."""
    rows = pid_s.to(tl.int64) * num_tokens + offs_m
    mask = (offs_n < out_features)[:, None] & (offs_m < num_tokens)[None, :]
    tl.store(partial_ptr + rows[None, :] * out_features + offs_n[:, None], total, mask=mask)


@triton.jit
def sum_partials(
    partial_ptr,
    offs_n,
    offs_m,
    num_tokens,
    out_features,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sum of a (BLOCK_N, BLOCK_M) tile's segments, which other programs have stored, in their order."""
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=partial_ptr.dtype.element_ty)
    mask = (offs_n < out_features)[:, None] & (offs_m < num_tokens)[None, :]
    for split in tl.static_range(NUM_SPLITS):
        rows = tl.cast(split, tl.int64) * num_tokens + offs_m
        # Past the first level of cache, which does not see what other multiprocessors write.
        partial_ptrs = partial_ptr + rows[None, :] * out_features + offs_n[:, None]
        total += tl.load(partial_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def segment_sum(
    x_ptrs,
    weight_ptrs,
    begin,
    end,
    in_features,
    offs_k,
    mask_m,
    EVEN_K: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    SUM_APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """sum over begin <= k < end of W[n, k] x[m, k], as (BLOCK_N, BLOCK_M); `begin` starts a tile of BLOCK_K."""
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=ACC_DTYPE)
    for start in tl.range(begin, end, BLOCK_K):
        if EVEN_K:
            weight = tl.load(weight_ptrs + start)
            x = tl.load(x_ptrs + start, mask=mask_m[None, :], other=0.0)
        else:
            mask_k = start + offs_k < in_features
            weight = tl.load(weight_ptrs + start, mask=mask_k[None, :], other=0.0)
            x = tl.load(x_ptrs + start, mask=mask_k[:, None] & mask_m[None, :], other=0.0)
        if SUM_APART:
            acc += tl.dot(weight, x, out_dtype=ACC_DTYPE)
        else:
            acc = tl.dot(weight, x, acc, input_precision="ieee", out_dtype=ACC_DTYPE)
    return acc


@triton.jit
def program_sum(
    x_ptrs,
    weight_ptrs,
    pid_s,
    split_features,
    in_features,
    offs_k,
    mask_m,
    SPLITS_PER_PROGRAM: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    SUM_APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What a program sums of a tile: segment `pid_s`, or all segments, each by itself and then in order."""
    if SPLITS_PER_PROGRAM == 1:
        begin = pid_s * split_features
        end = tl.minimum(begin + split_features, in_features)
        total = segment_sum(
            x_ptrs, weight_ptrs, begin, end, in_features, offs_k, mask_m,
            EVEN_K, ACC_DTYPE, SUM_APART, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        total = tl.zeros([BLOCK_N, BLOCK_M], dtype=ACC_DTYPE)
        for split in tl.range(0, SPLITS_PER_PROGRAM):
            begin = split * split_features
            end = tl.minimum(begin + split_features, in_features)
            total += segment_sum(
                x_ptrs, weight_ptrs, begin, end, in_features, offs_k, mask_m,
                EVEN_K, ACC_DTYPE, SUM_APART, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    return total


@triton.jit
def linear_kernel(
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
    stride_x,
    stride_weight,
    stride_y,
    split_features,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PER_PROGRAM: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    SUM_APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """`out_features`: N, or those of the gate. The rows of up, their biases and partial sums lie behind the gate's."""
    pid_s = tl.program_id(1)
    num_tiles_n = tl.cdiv(out_features, BLOCK_N)
    pid_n, pid_m = grouped_tile(tl.program_id(0), num_tiles_n, tl.cdiv(num_tokens, BLOCK_M), GROUP_N)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < num_tokens
    # Rows past the last one read the last row again and are not stored, so that the loads of weights need no mask.
    rows = tl.minimum(offs_n, out_features - 1).to(tl.int64)
    weight_ptrs = weight_ptr + rows[:, None] * stride_weight + offs_k[None, :]
    x_ptrs = x_ptr + offs_m[None, :].to(tl.int64) * stride_x + offs_k[:, None]

    total = program_sum(
        x_ptrs, weight_ptrs, pid_s, split_features, in_features, offs_k, mask_m,
        SPLITS_PER_PROGRAM, EVEN_K, ACC_DTYPE, SUM_APART, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    up = total
    if ACTIVATION is not None:
        up = program_sum(
            x_ptrs, weight_ptrs + tl.cast(out_features, tl.int64) * stride_weight, pid_s, split_features,
            in_features, offs_k, mask_m,
            SPLITS_PER_PROGRAM, EVEN_K, ACC_DTYPE, SUM_APART, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if SPLITS_PER_PROGRAM < NUM_SPLITS:
        up_ptr = partial_ptr + tl.cast(out_features, tl.int64) * num_tokens * NUM_SPLITS
        store_partial(total, partial_ptr, pid_s, offs_n, offs_m, num_tokens, out_features)
        if ACTIVATION is not None:
            store_partial(up, up_ptr, pid_s, offs_n, offs_m, num_tokens, out_features)
        if not is_last_program(counters_ptr + tl.program_id(0), NUM_SPLITS):
            return
        total = sum_partials(partial_ptr, offs_n, offs_m, num_tokens, out_features, NUM_SPLITS, BLOCK_M, BLOCK_N)
        if ACTIVATION is not None:
            up = sum_partials(up_ptr, offs_n, offs_m, num_tokens, out_features, NUM_SPLITS, BLOCK_M, BLOCK_N)
    if ACTIVATION is not None:
        store_gated_tile(
            total, up, bias_ptr, y_ptr, offs_n, offs_m, num_tokens, out_features, stride_y, HAS_BIAS, ACTIVATION
        )  # fmt: skip
    else:
        store_tile(
            total, x_scale_ptr, weight_scale_ptr, bias_ptr, y_ptr, offs_n, offs_m,
            num_tokens, out_features, stride_y, HAS_SCALE, HAS_BIAS,
        )  # fmt: skip


def splits_in_program(num_splits: int, num_tiles: int, deterministic: bool) -> int:
    """Number of splits that one program computes: one, or all of them if the tiles alone fill the GPU.

    Without `deterministic` one, because the number of splits is already chosen for the batch; but more tiles than there
    are counters fill any GPU.
    """
    most_tiles = TILES_THAT_FILL - 1 if deterministic else NUM_COUNTERS
    return num_splits if num_tiles > most_tiles else 1


class Splits(NamedTuple):
    """How a launch divides the inputs, and where the programs of a tile leave their sums."""

    size: int
    """Units of inputs in each."""
    count: int
    in_program: int
    partial: Tensor
    """(count, T, columns); any tensor where programs leave nothing."""
    arrived: Tensor
    """A counter for each tile; likewise."""


def plan_splits(
    num_units: int,
    most_splits: int,
    num_tiles: int,
    y: Tensor,
    deterministic: bool,
    columns: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Splits:
    """For `num_units` of inputs that each program takes whole, and `y` (T, N). `columns` of partial sums of `dtype`; 0
    = N."""
    size = cdiv(num_units, most_splits)
    # Only splits that have work: ten units in eight splits are five splits of two.
    count = cdiv(num_units, size)
    in_program = splits_in_program(count, num_tiles, deterministic)
    if in_program == count:
        return Splits(size, count, in_program, y, y)
    partial = torch.empty((count, y.shape[0], columns or y.shape[1]), dtype=dtype, device=y.device)
    return Splits(size, count, in_program, partial, counters(num_tiles, y.device))


def launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    config: Mapping[str, int],
    deterministic: bool,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """Launch the product of checked `x` (T, K) and `weight` (N, K) with the tile shape and splits of `config`.

    `activation`, without scales: returns (T, N / 2), f of the first half of the columns times the second half.
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0] if activation is None else weight.shape[0] // 2
    y = torch.empty((num_tokens, out_features), dtype=out_dtype, device=x.device)
    if num_tokens == 0 or out_features == 0:
        return y
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    num_tiles = cdiv(out_features, block_n) * cdiv(num_tokens, block_m)
    is_integer = x.dtype == torch.int8
    splits = plan_splits(
        cdiv(in_features, block_k),
        config["NUM_SPLITS"],
        num_tiles,
        y,
        deterministic,
        weight.shape[0],
        torch.int32 if is_integer else torch.float32,
    )
    linear_kernel[(num_tiles, splits.count // splits.in_program)](
        x,
        weight,
        y if x_scale is None else x_scale,
        y if weight_scale is None else weight_scale,
        y if bias is None else bias,
        y,
        splits.partial,
        splits.arrived,
        num_tokens,
        out_features,
        in_features,
        x.stride(0),
        weight.stride(0),
        y.stride(0),
        splits.size * block_k,
        HAS_SCALE=x_scale is not None,
        HAS_BIAS=bias is not None,
        ACTIVATION=None if activation is None else activation.value,
        NUM_SPLITS=splits.count,
        SPLITS_PER_PROGRAM=splits.in_program,
        EVEN_K=in_features % block_k == 0,
        ACC_DTYPE=tl.int32 if is_integer else tl.float32,
        # Hopper's matrix unit keeps about 14 bits of an fp8 sum: the sum of every BLOCK_K products is added to a
        # float32 register, or errors would grow with K. (With max_num_imprecise_acc instead, triton 3.8 reads a
        # product's registers without waiting for it, and the assembler then serialises all instructions of the matrix
        # unit.)
        SUM_APART=x.dtype == torch.float8_e4m3fn,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_N=config["GROUP_N"],
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    return y
