"""A product for each head: what makes queries for latents of DeepSeek's heads, and values of what attention gathers.

    y[m, h, n] = round(sum_k W[h, n, k] x[m, h, k])          x (T, heads, K), W (heads, N, K), summed in float32

Tiles as of `_linear_kernels`, without splits of K: heads alone fill the GPU. Bytes: size of the dtype * heads * (N K +
T K + T N); operations: 2 T heads N K. Of DeepSeek-V3 (128 heads of 128, latents of 512), bfloat16: 16.8 MB of weights,
3.9 us at 4.3 TB/s for few tokens; from about 200 on the matrix unit bounds, 16.8 MFLOP a token.

Deterministic or not, the tile shape depends on the weight alone: a row's bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import cdiv, check_dtype, check_float, check_shape, check_unit_stride
from inflight_kernels.matmul.gpu._linear_kernels import segment_sum, store_tile
from inflight_kernels.matmul.gpu.linear import needs_small_tiles
from inflight_kernels.tuning import tuned

# What the tuning script tries.
CANDIDATES: tuple[Mapping[str, int], ...] = tuple(
    dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=4, num_stages=stages)
    for m, n, k, stages in ((16, 64, 64, 3), (32, 128, 64, 3), (64, 128, 64, 4), (64, 64, 128, 3))
)


def default_config(in_features: int, element_size: int) -> Mapping[str, int]:
    """As the linear layer's deterministic one, see there. Not measured yet."""
    if needs_small_tiles(in_features, element_size):
        return dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=3)
    return dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=4)


@triton.jit
def head_linear_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    num_tokens,
    out_features,
    in_features,
    stride_xt,
    stride_xh,
    stride_wh,
    stride_wn,
    stride_yt,
    stride_yh,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (tiles of N, tiles of T, heads): programs that run together share the tokens of a head, or its weights."""
    pid_h = tl.program_id(2).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < num_tokens
    # Rows past the last one read the last row again and are not stored, so that the loads of weights need no mask.
    rows = tl.minimum(offs_n, out_features - 1).to(tl.int64)
    weight_ptrs = weight_ptr + pid_h * stride_wh + rows[:, None] * stride_wn + offs_k[None, :]
    x_ptrs = x_ptr + pid_h * stride_xh + offs_m[None, :].to(tl.int64) * stride_xt + offs_k[:, None]
    total = segment_sum(
        x_ptrs, weight_ptrs, 0, in_features, in_features, offs_k, mask_m,
        EVEN_K, tl.float32, False, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    store_tile(
        total, y_ptr, y_ptr, y_ptr, y_ptr + pid_h * stride_yh, offs_n, offs_m,
        num_tokens, out_features, stride_yt, False, False,
    )  # fmt: skip


def head_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    deterministic: bool = False,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch the product of each head; see `inflight_kernels.head_linear`. `config` overrides the tuned one."""
    check_float("x", x)
    check_dtype("weight", weight, x.dtype)
    if x.dim() != 3 or weight.dim() != 3 or x.shape[1:] != (weight.shape[0], weight.shape[2]):
        raise ValueError(
            "x must be (num_tokens, heads, in_features) and weight (heads, out_features, in_features), got "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    num_tokens, num_heads, in_features = x.shape
    out_features = weight.shape[1]
    if out is None:
        out = torch.empty((num_tokens, num_heads, out_features), dtype=x.dtype, device=x.device)
    check_dtype("out", out, x.dtype)
    check_shape("out", out, (num_tokens, num_heads, out_features))
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        check_unit_stride(name, tensor)
    if num_tokens == 0:
        return out
    if config is None:
        shape: dict[str, int | str] = {"heads": num_heads, "n": out_features, "k": in_features, "dtype": str(x.dtype)}
        config = tuned("head_linear", shape, default_config(in_features, x.element_size()), x.device)
    grid = (cdiv(out_features, config["BLOCK_N"]), cdiv(num_tokens, config["BLOCK_M"]), num_heads)
    head_linear_kernel[grid](
        x,
        weight,
        out,
        num_tokens,
        out_features,
        in_features,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        out.stride(0),
        out.stride(1),
        EVEN_K=in_features % config["BLOCK_K"] == 0,
        BLOCK_M=config["BLOCK_M"],
        BLOCK_N=config["BLOCK_N"],
        BLOCK_K=config["BLOCK_K"],
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    return out
