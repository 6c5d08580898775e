"""Many low-rank adapters on one batch: each row's adapter product is added to the layer's output, in place.

    y[t] = round(y[t] + scale[n] * B[n] round(A[n] x[t])),   n = adapters[t],   rows with n = -1 are not changed

Two launches, without host work between them:
    shrink   grid (tiles of rows x adapters, splits of K, slices): z[split, slice, t] = A x over a part of K, float32
    expand   grid (tiles of rows x adapters, tiles of columns): sums z over the splits in order, then adds B z to y
A program whose tile has no row of its adapter returns after one load, so rows need not be sorted, and a CUDA graph
captured for a number of tokens can be replayed for any adapters. Only the programs of its adapter write a row: no
atomics. Slices are layers with the same input x and adjacent outputs in y (query, key, value; gate, up): A is stacked
along its rank and B along its outputs, and one call computes all of them.

Bytes: each adapter in use once, r (in * slices + out) elements, and per row in + 2 out elements. Operations are few:
2 r (in * slices + out) per row. On an H200 (4.3 TB/s), bf16, r = 16, 64 rows, 32 adapters in use:
    query, key, value   4096 -> 4096 + 1024 + 1024    18.9 MB + 2.1 MB    4.9 us
    output              4096 -> 4096                   8.4 MB + 1.6 MB    2.3 us
    gate, up            4096 -> 14336 + 14336         37.7 MB + 7.9 MB   10.6 us
    down                14336 -> 4096                 18.9 MB + 2.9 MB    5.1 us
With 32 adapters in one batch on every linear layer of an 8B model that is 22.9 us per layer and 0.73 ms per step: 20 %
of the 3.7 ms that reading the model's own weights takes at least, and 6 % with adapters on the attention layers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import (
    cdiv,
    check_dtype,
    check_float,
    check_shape,
    check_unit_stride,
    check_vector,
    next_power_of_2,
)
from inflight_kernels.tuning import tuned

MAX_RANK = 128
MAX_SLICES = 3
# Ranks that the second launch processes at once: the minimum of a matrix instruction.
STEP_R = 16
# Elements of A in one step of K. With 128 x 128 registers spilled on sm_80.
A_TILE_ELEMENTS = 8192


def _config(
    block_m: int, block_n: int, block_k: int, split_k: int, num_warps: int = 4, num_stages: int = 3
) -> dict[str, int]:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLIT_K": split_k,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


CANDIDATES = [
    _config(16, 64, 128, 4, num_warps=2),
    _config(16, 256, 128, 8),
    _config(64, 128, 128, 4),
    _config(64, 128, 128, 8, num_warps=8),
    _config(64, 128, 128, 1),
]


def default_config(num_tokens: int | None, in_features: int, dtype: torch.dtype) -> Mapping[str, int]:
    """The launch without a tuned table. `num_tokens` is None if it must not depend on the batch.

    One tile holds a decode batch, so that an adapter is read once; masked rows cost multiplications, which are free
    here. Splits of about 1024 of K give 128 programs for 32 adapters of one slice, about one per multiprocessor; with
    more than a few tiles of rows there are enough programs without splits. For few rows the tiles of columns are
    narrow, to use more multiprocessors. Not measured yet.
    """
    if dtype == torch.float32:
        return _config(16, 32, 32, 2)
    if num_tokens is not None and num_tokens > 256:
        return _config(64, 128, 128, 1)
    split_k = min(next_power_of_2(cdiv(in_features, 1024)), 8)
    if num_tokens is not None and num_tokens <= 16:
        return _config(16, 64, 128, split_k, num_warps=2)
    return _config(64, 128, 128, split_k)


@triton.jit
def _rows_of_adapter(adapters_ptr, num_tokens, num_adapters, BLOCK_M: tl.constexpr):
    """This program's adapter, the tokens of its tile, and a mask of those that use the adapter."""
    pid = tl.program_id(0)
    adapter = pid % num_adapters
    offs_m = (pid // num_adapters) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = tl.load(adapters_ptr + offs_m, mask=offs_m < num_tokens, other=-1) == adapter
    return adapter.to(tl.int64), offs_m.to(tl.int64), mask_m


# One compiled kernel for every number of tokens, and for slots at any address, which are a part of what a step sends:
# triton would otherwise specialise for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["adapters_ptr", "num_tokens"])
def lora_shrink_kernel(
    x_ptr,
    a_ptr,
    z_ptr,
    adapters_ptr,
    num_tokens,
    num_adapters,
    in_features,
    rank,
    stride_xt,
    stride_an,
    stride_ar,
    NUM_SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    adapter, offs_m, mask_m = _rows_of_adapter(adapters_ptr, num_tokens, num_adapters, BLOCK_M)
    if tl.max(mask_m.to(tl.int32), axis=0) == 0:
        return
    pid_k = tl.program_id(1)
    pid_slice = tl.program_id(2)
    offs_k = tl.arange(0, BLOCK_K)
    offs_r = tl.arange(0, BLOCK_R)
    part = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = pid_k * part
    end = tl.minimum(begin + part, in_features)
    x_ptrs = x_ptr + offs_m[:, None] * stride_xt + offs_k[None, :]
    a_ptrs = a_ptr + adapter * stride_an + (pid_slice * rank + offs_r)[:, None] * stride_ar + offs_k[None, :]
    mask_r = offs_r < rank

    acc = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        mask_k = (start + offs_k < in_features)[None, :]
        x = tl.load(x_ptrs + start, mask=mask_m[:, None] & mask_k, other=0.0)
        a = tl.load(a_ptrs + start, mask=mask_r[:, None] & mask_k, other=0.0)
        acc = tl.dot(x, a.T, acc, input_precision="ieee")

    # Columns past the rank are zeros, and so is a split past the end of K.
    rows = (pid_k * NUM_SLICES + pid_slice).to(tl.int64) * num_tokens + offs_m
    tl.store(z_ptr + rows[:, None] * BLOCK_R + offs_r[None, :], acc, mask=mask_m[:, None])


@triton.jit(do_not_specialize=["adapters_ptr", "num_tokens"])
def lora_expand_kernel(
    z_ptr,
    b_ptr,
    y_ptr,
    adapters_ptr,
    scales_ptr,
    num_tokens,
    num_adapters,
    rank,
    width_0,
    width_1,
    width_2,
    stride_bn,
    stride_bo,
    stride_yt,
    NUM_SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEP_R: tl.constexpr,
):
    adapter, offs_m, mask_m = _rows_of_adapter(adapters_ptr, num_tokens, num_adapters, BLOCK_M)
    if tl.max(mask_m.to(tl.int32), axis=0) == 0:
        return
    # Tiles of columns are numbered through the slices in order, and no tile spans two slices. An absent slice has width
    # 0, and there is no tile after the last slice.
    tile = tl.program_id(1)
    tiles_0, tiles_1 = tl.cdiv(width_0, BLOCK_N), tl.cdiv(width_1, BLOCK_N)
    past_0, past_1 = tile >= tiles_0, tile >= tiles_0 + tiles_1
    pid_slice = past_0.to(tl.int32) + past_1.to(tl.int32)
    tile -= tl.where(past_1, tiles_0 + tiles_1, tl.where(past_0, tiles_0, 0))
    first_column = tl.where(past_1, width_0 + width_1, tl.where(past_0, width_0, 0))
    width = tl.where(past_1, width_2, tl.where(past_0, width_1, width_0))
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, STEP_R)
    mask_n = offs_n < width
    columns = first_column + offs_n
    b_ptrs = b_ptr + adapter * stride_bn + columns[:, None] * stride_bo + offs_r[None, :]
    z_ptrs = z_ptr + (pid_slice * num_tokens + offs_m)[:, None] * BLOCK_R + offs_r[None, :]
    stride_split = NUM_SLICES * num_tokens * BLOCK_R

    product = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    # The rank in small steps: the loads of all splits of a step are in flight at once, and a large rank fits into the
    # registers.
    for start in tl.static_range(0, BLOCK_R, STEP_R):
        b = tl.load(b_ptrs + start, mask=mask_n[:, None] & (start + offs_r < rank)[None, :], other=0.0)
        z = tl.zeros([BLOCK_M, STEP_R], dtype=tl.float32)
        for part in tl.static_range(SPLIT_K):
            z += tl.load(z_ptrs + (part * stride_split + start), mask=mask_m[:, None], other=0.0)
        product = tl.dot(z.to(b.dtype), b.T, product, input_precision="ieee")

    y_ptrs = y_ptr + offs_m[:, None] * stride_yt + columns[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32) + tl.load(scales_ptr + adapter) * product
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


def _check(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor, scales: Tensor, slices: Sequence[int]) -> None:
    check_float("x", x)
    if x.dim() != 2 or a.dim() != 3 or b.dim() != 3:
        raise ValueError(
            "x must be (num_tokens, in_features), a (num_adapters, slices * rank, in_features) and b (num_adapters, "
            f"out_features, rank), got {tuple(x.shape)}, {tuple(a.shape)}, {tuple(b.shape)}"
        )
    num_adapters, out_features, rank = b.shape
    if not 1 <= len(slices) <= MAX_SLICES or min(slices) < 1 or sum(slices) != out_features:
        raise ValueError(f"slices must be 1 to {MAX_SLICES} widths that sum to {out_features}, got {list(slices)}")
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"lora_add takes ranks of 1 to {MAX_RANK}, got {rank}")
    check_shape("a", a, (num_adapters, len(slices) * rank, x.shape[1]))
    check_shape("y", y, (x.shape[0], out_features))
    for name, tensor in (("x", x), ("y", y), ("a", a), ("b", b)):
        check_dtype(name, tensor, x.dtype)
        check_unit_stride(name, tensor)
    check_vector("adapters", adapters, x.shape[0], torch.int32)
    check_vector("scales", scales, num_adapters, torch.float32)


def lora_add(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    adapters: Tensor,
    scales: Tensor,
    slices: Sequence[int] | None = None,
    deterministic: bool = False,
    ranks: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch shrink and expand, which add the adapters' products to `y` (T, out); see `inflight_kernels.lora_add`.

    `ranks` are not read: smaller adapters are multiplied with their zeros.
    """
    widths = [b.shape[1]] if slices is None else list(slices)
    _check(y, x, a, b, adapters, scales, widths)
    num_tokens, in_features = x.shape
    num_adapters, out_features, rank = b.shape
    if not num_tokens or not num_adapters:
        return y
    if config is None:
        shape: dict[str, int | str] = {
            "in": in_features,
            "out": out_features,
            "rank": next_power_of_2(rank),
            "slices": len(widths),
            "dtype": str(x.dtype).removeprefix("torch."),
        }
        if not deterministic:
            shape["tokens"] = next_power_of_2(num_tokens)
            shape["adapters"] = next_power_of_2(num_adapters)
        default = default_config(None if deterministic else num_tokens, in_features, x.dtype)
        config = tuned("lora_add", shape, default, x.device)
    block_m, block_n, split_k = config["BLOCK_M"], config["BLOCK_N"], config["SPLIT_K"]
    block_r = max(next_power_of_2(rank), 16)
    z = torch.empty((split_k, len(widths), num_tokens, block_r), dtype=torch.float32, device=x.device)
    row_programs = cdiv(num_tokens, block_m) * num_adapters
    shared = {
        "NUM_SLICES": len(widths),
        "SPLIT_K": split_k,
        "BLOCK_M": block_m,
        "BLOCK_R": block_r,
        "num_warps": config["num_warps"],
        "num_stages": config["num_stages"],
    }
    lora_shrink_kernel[(row_programs, split_k, len(widths))](
        x, a, z, adapters, num_tokens, num_adapters, in_features, rank, x.stride(0), a.stride(0), a.stride(1),
        BLOCK_K=min(config["BLOCK_K"], max(A_TILE_ELEMENTS // block_r, 16)), **shared,
    )  # fmt: skip
    lora_expand_kernel[(row_programs, sum(cdiv(width, block_n) for width in widths))](
        z, b, y, adapters, scales, num_tokens, num_adapters, rank, *(widths + [0, 0])[:MAX_SLICES],
        b.stride(0), b.stride(1), y.stride(0), BLOCK_N=block_n, STEP_R=STEP_R, **shared,
    )  # fmt: skip
    return y
