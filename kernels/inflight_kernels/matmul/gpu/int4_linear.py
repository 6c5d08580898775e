"""The linear layer of 4-bit weights and 16-bit activations (W4A16), dequantised on the way to the matrix unit.

    y[m, n] = round(sum_k w[n, k] x[m, k] + bias[n]),   w[n, k] = round((q[n, k] - zero[g, n]) * scale[g, n])

g is the group of k; the sum is in float32. The words of `Int4Weight` (see `weight_formats`) hold four planes of 32
neighbouring columns each. A nibble becomes a float by being set into the mantissa of a power of two whose last bit has
the value 1 (128 in bfloat16, 1024 in float16). This avoids conversion instructions, which run at a quarter of the speed
of others and alone would take longer than reading the weights. That power of two plus the zero point is then
subtracted, which is exact. Scale and zero point share a word of 32 bits, because nothing smaller can be copied
asynchronously, and waiting for a load in every tile would cost more than everything else.

Bytes: N K / 2 for the words, 4 N K / group_size for scales and zero points, 2 (T K + T N); operations: 2 T N K. On an
H200 at 4.3 TB/s and 790 TFLOP/s, Llama-8B, groups of 128:

                               T = 1     T = 16    T = 64    T = 2048
    qkv        6144 x  4096     3.1 us    3.2 us    3.4 us     131 us
    o          4096 x  4096     2.1 us    2.1 us    2.3 us      87 us
    gate_up   28672 x  4096    14.5 us   14.8 us   15.5 us     609 us
    down       4096 x 14336     7.3 us    7.4 us    7.8 us     304 us

`_linear_kernels` describes how the sums of the splits are added.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import (
    cdiv,
    check_dtype,
    check_shape,
    check_unit_stride,
    check_vector,
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
from inflight_kernels.matmul.gpu.linear import wanted_splits
from inflight_kernels.matmul.weight_formats import INT4_BASE, INT4_BLOCK, INT4_PLANE, Int4Weight
from inflight_kernels.tuning import tuned

# What the tuning script tries, the last for prompts. A tile is always one block of 128 columns deep.
CANDIDATES: tuple[Mapping[str, int], ...] = tuple(
    dict(BLOCK_M=m, BLOCK_N=n, NUM_SPLITS=splits, GROUP_N=8, num_warps=warps, num_stages=stages)
    for m, n, splits, warps, stages in (
        (16, 64, 2, 4, 6),
        (16, 128, 4, 4, 5),
        (32, 128, 4, 4, 4),
        (64, 128, 1, 8, 4),
        (64, 128, 4, 4, 4),
        (128, 128, 1, 8, 3),
    )
)


# On Blackwell each of a block's four products has its own accumulator in tensor memory (triton 3.8). Four accumulators
# of 128 tokens exceed its 512 columns: the kernel would be compiled to a trap. The launcher uses half as many tokens.
BLACKWELL = 100
MAX_BLACKWELL_BLOCK_M = 64


@triton.jit
def dequantise(words, scale_zero, PLANE: tl.constexpr, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """(BLOCK_N, 32) columns of the weight from one nibble of each word and the (BLOCK_N,) words of its group."""
    # The bits of 128 or 1024, whose last place is 1.
    BASE: tl.constexpr = 0x4300 if tl.bfloat16 == DTYPE else 0x6400
    if IN_PAIRS:
        # (word >> 4 PLANE) & 15 | BASE for both words of a register at once; the compiler would handle them one by one.
        q = tl.inline_asm_elementwise(
            f"shr.b32 $0, $1, {4 * PLANE}; lop3.b32 $0, $0, 0x000f000f, {BASE * 0x10001}, 0xea;",
            "=r,r",
            [words],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
    else:
        q = ((words >> (4 * PLANE)) & 15) | BASE
    scale = (scale_zero >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    zero = scale_zero.to(tl.int16).to(DTYPE, bitcast=True)
    return ((q.to(DTYPE, bitcast=True) - zero[:, None]) * scale[:, None]).to(DTYPE)


@triton.jit
def int4_segment_sum(
    x_ptrs,
    qweight_ptrs,
    scale_zero_ptrs,
    first_block,
    end_block,
    out_features,
    in_features,
    group_size,
    offs_k,
    mask_m,
    EVEN_K: tl.constexpr,
    PLANES_PER_SCALE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum of W[n, k] x[m, k] over the columns of blocks [first_block, end_block), as (BLOCK_N, BLOCK_M)."""
    dtype: tl.constexpr = x_ptrs.dtype.scalar.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    last_group = in_features // group_size - 1
    # Every split has at least one block. If the loop might not run, the sums might be written by no product, and the
    # assembler would serialise all instructions of Hopper's matrix unit.
    tl.assume(first_block < end_block)
    for block in tl.range(first_block, end_block):
        words = tl.load(qweight_ptrs + tl.cast(block, tl.int64) * out_features * 32)
        for plane in tl.static_range(4):
            start = block * 128 + plane * 32
            if plane % PLANES_PER_SCALE == 0:
                # Padded columns belong to no group and are multiplied by zeros of x; they use the last group's scale.
                group = tl.cast(tl.minimum(start // group_size, last_group), tl.int64)
                scale_zero = tl.load(scale_zero_ptrs + group * out_features)
            weight = dequantise(words, scale_zero, plane, dtype, IN_PAIRS)
            mask = mask_m[None, :]
            if not EVEN_K:
                mask = mask & (start + offs_k < in_features)[:, None]
            x = tl.load(x_ptrs + start, mask=mask, other=0.0)
            acc = tl.dot(weight, x, acc, input_precision="ieee")
    return acc


# One compiled kernel for every number of tokens: triton would otherwise specialise for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def int4_linear_kernel(
    x_ptr,
    qweight_ptr,
    scale_zero_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    counters_ptr,
    num_tokens,
    out_features,
    in_features,
    group_size,
    stride_x,
    stride_y,
    split_blocks,
    HAS_BIAS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PER_PROGRAM: tl.constexpr,
    EVEN_K: tl.constexpr,
    PLANES_PER_SCALE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    pid_s = tl.program_id(1)
    num_tiles_n = tl.cdiv(out_features, BLOCK_N)
    pid_n, pid_m = grouped_tile(tl.program_id(0), num_tiles_n, tl.cdiv(num_tokens, BLOCK_M), GROUP_N)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, 32)
    mask_m = offs_m < num_tokens
    # Rows past the last one read the last row again and are not stored, so that the loads of weights need no mask.
    rows = tl.minimum(offs_n, out_features - 1)
    qweight_ptrs = qweight_ptr + rows[:, None] * 32 + offs_k[None, :]
    x_ptrs = x_ptr + offs_m[None, :].to(tl.int64) * stride_x + offs_k[:, None]
    num_blocks = tl.cdiv(in_features, 128)

    if SPLITS_PER_PROGRAM == 1:
        first = pid_s * split_blocks
        total = int4_segment_sum(
            x_ptrs, qweight_ptrs, scale_zero_ptr + rows, first,
            tl.minimum(first + split_blocks, num_blocks), out_features, in_features, group_size, offs_k, mask_m,
            EVEN_K, PLANES_PER_SCALE, IN_PAIRS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for split in tl.range(0, SPLITS_PER_PROGRAM):
            first = split * split_blocks
            total += int4_segment_sum(
                x_ptrs, qweight_ptrs, scale_zero_ptr + rows, first,
                tl.minimum(first + split_blocks, num_blocks), out_features, in_features, group_size, offs_k, mask_m,
                EVEN_K, PLANES_PER_SCALE, IN_PAIRS, BLOCK_M, BLOCK_N,
            )  # fmt: skip

    if SPLITS_PER_PROGRAM == NUM_SPLITS:
        store_tile(
            total, y_ptr, y_ptr, bias_ptr, y_ptr, offs_n, offs_m, num_tokens, out_features, stride_y, False, HAS_BIAS
        )  # fmt: skip
    else:
        store_partial(total, partial_ptr, pid_s, offs_n, offs_m, num_tokens, out_features)
        if is_last_program(counters_ptr + tl.program_id(0), NUM_SPLITS):
            total = sum_partials(partial_ptr, offs_n, offs_m, num_tokens, out_features, NUM_SPLITS, BLOCK_M, BLOCK_N)
            store_tile(
                total, y_ptr, y_ptr, bias_ptr, y_ptr, offs_n, offs_m, num_tokens, out_features, stride_y, False,
                HAS_BIAS,
            )  # fmt: skip


def default_config(num_tokens: int, out_features: int, in_features: int, device: torch.device) -> dict[str, int]:
    """The launch without a tuned table.

    Up to 16 tokens two programs per multiprocessor, so that one dequantises while the other waits, each with 16 KiB of
    words in flight; up to 64 one program with 24 KiB, because more of x than of the words is then read. So many splits,
    of at least eight blocks, that all of these have work. Beyond 64 tokens square tiles: each tile dequantises its
    weights again, so that fewer and larger ones waste less. Not measured yet.
    """
    block_m = min(max(next_power_of_2(num_tokens), 16), 128)
    block_n, programs = (64, 2) if block_m == 16 else (128, 1)
    # Of the next power of two, so that no number of tokens between two of them needs a kernel of its own.
    tiles = cdiv(out_features, block_n) * cdiv(next_power_of_2(num_tokens), block_m)
    splits = wanted_splits(tiles, programs * multiprocessor_count(device))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "NUM_SPLITS": min(splits, max(in_features // (8 * INT4_BLOCK), 1)),
        "GROUP_N": 8,
        "num_warps": 4 if block_m < 64 else 8,
        "num_stages": 5 if block_m == 16 else 4 if block_m <= 64 else 3,
    }


def deterministic_config(out_features: int, in_features: int) -> dict[str, int]:
    """The configuration of a weight for every batch, which depends on the weight's shape only, not even on the device.

    Eight warps, because the split's sum and the total are in registers at once.
    """
    splits = wanted_splits(cdiv(out_features, 128), 132)
    return {
        "BLOCK_M": 64,
        "BLOCK_N": 128,
        "NUM_SPLITS": min(splits, max(in_features // (8 * INT4_BLOCK), 1)),
        "GROUP_N": 8,
        "num_warps": 8,
        "num_stages": 4,
    }


def _check(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> None:
    if x.dtype not in INT4_BASE:
        raise ValueError(f"x must be float16 or bfloat16, got {x.dtype}")
    in_features, group_size = weight.in_features, weight.group_size
    out_features = weight.qweight.shape[1]
    if x.dim() != 2 or x.shape[1] != in_features:
        raise ValueError(f"x must be (num_tokens, {in_features}), got {tuple(x.shape)}")
    check_unit_stride("x", x)
    if group_size % INT4_PLANE or in_features % group_size:
        raise ValueError(f"groups of 4-bit weights hold a multiple of {INT4_PLANE} columns, got {group_size}")
    check_dtype("qweight", weight.qweight, torch.int16)
    check_shape("qweight", weight.qweight, (cdiv(in_features, INT4_BLOCK), out_features, INT4_PLANE))
    check_dtype("scale_zero", weight.scale_zero, torch.int32)
    check_shape("scale_zero", weight.scale_zero, (in_features // group_size, out_features))
    if weight.dtype != x.dtype:
        raise ValueError(f"the weight is packed for {weight.dtype}, got x of {x.dtype}")
    for name in ("qweight", "scale_zero"):
        if not getattr(weight, name).is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if bias is not None:
        check_vector("bias", bias, out_features, x.dtype)


def int4_linear(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    deterministic: bool = False,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch the 4-bit linear layer; see `inflight_kernels.int4_linear`. `config` overrides every choice."""
    _check(x, weight, bias)
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    num_tokens, in_features = x.shape
    out_features = weight.qweight.shape[1]
    y = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    if num_tokens == 0 or out_features == 0:
        return y
    if config is None and deterministic:
        config = deterministic_config(out_features, in_features)
    elif config is None:
        default = default_config(num_tokens, out_features, in_features, x.device)
        rows = min(max(next_power_of_2(num_tokens), 16), 8192)
        shape = {"m": str(rows), "n": out_features, "k": in_features, "dtype": str(x.dtype)}
        config = tuned("int4_linear", shape, default, x.device)
    _launch(x, weight, bias, y, config, deterministic)
    return y


def _launch(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, y: Tensor, config: Mapping[str, int], deterministic: bool
) -> None:
    num_tokens, in_features = x.shape
    out_features = y.shape[1]
    block_m = config["BLOCK_M"]
    if compute_capability(x.device) >= BLACKWELL:
        block_m = min(block_m, MAX_BLACKWELL_BLOCK_M)
    num_tiles = cdiv(out_features, config["BLOCK_N"]) * cdiv(num_tokens, block_m)
    splits = plan_splits(cdiv(in_features, INT4_BLOCK), config["NUM_SPLITS"], num_tiles, y, deterministic)
    planes = weight.group_size // INT4_PLANE
    int4_linear_kernel[(num_tiles, splits.count // splits.in_program)](
        x,
        weight.qweight,
        weight.scale_zero,
        y if bias is None else bias,
        y,
        splits.partial,
        splits.arrived,
        num_tokens,
        out_features,
        in_features,
        weight.group_size,
        x.stride(0),
        y.stride(0),
        splits.size,
        HAS_BIAS=bias is not None,
        NUM_SPLITS=splits.count,
        SPLITS_PER_PROGRAM=splits.in_program,
        EVEN_K=in_features % INT4_BLOCK == 0,
        # Planes of a block that share a scale, if groups are whole blocks or divide them; else each plane loads its
        # own.
        PLANES_PER_SCALE=4 if planes % 4 == 0 else 2 if planes == 2 else 1,
        # The interpreter has no assembler.
        IN_PAIRS=not triton.knobs.runtime.interpret,
        BLOCK_M=block_m,
        BLOCK_N=config["BLOCK_N"],
        GROUP_N=config["GROUP_N"],
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
