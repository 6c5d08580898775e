"""Attention of the tokens of whole sequences, packed one behind the other, each to all tokens of its own sequence.

    p_ij = softmax_j(scale * q_i . k_j + bias_{j - i}),   o_i = sum_j p_ij v_j,
    over all keys j of i's sequence, or those with |i - j| <= w

Grid (query tiles, Hq, B). Tiles of keys begin at multiples of BLOCK_N in the sequence, and nothing in the launch that
affects the order of sums depends on the batch: a sequence's bits are the same alone and beside any others.

Operations: 4 Hq D for each pair of a query and a visible key: 51.5e9 for 64 sequences of 512 tokens, Hq = 12, D = 64.
Bytes: 8 T Hq D in bf16, if the keys of a sequence stay in the L2 cache: 0.2 GB, 47 us at 4.3 TB/s. Matrix throughput
would take 65 us at an H200's 790 TFLOP/s, and exp2, of 64 * 12 * 512^2 scores at 16 a cycle and multiprocessor, 52 us
beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.attention.gpu._attention import LOG2_E, check_scales
from inflight_kernels.common.checks import (
    cdiv,
    check_dtype,
    check_float,
    check_shape,
    check_unit_stride,
    check_vector,
    next_power_of_2,
)


# One compiled kernel for all batches: triton would otherwise specialise for sizes that are 1 or multiples of 16, and
# for pointers aligned to 16 bytes.
@triton.jit(do_not_specialize=["starts_ptr", "bias_ptr", "bias_size"])
def bidirectional_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    starts_ptr,
    bias_ptr,
    out_ptr,
    scale,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    bias_size,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = tl.program_id(1)
    begin = tl.load(starts_ptr + tl.program_id(2)).to(tl.int64)
    length = (tl.load(starts_ptr + tl.program_id(2) + 1) - begin).to(tl.int32)
    first = tl.program_id(0) * BLOCK_M
    if first >= length:
        return
    queries = first + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m, mask_d = queries < length, offs_d < HEAD_DIM
    q_offs = (begin + queries)[:, None] * stride_qt + head.to(tl.int64) * stride_qh + offs_d[None, :]
    q = tl.load(q_ptr + q_offs, mask=mask_m[:, None] & mask_d[None, :], other=0.0)
    k_head_ptr = k_ptr + begin * stride_kt + (head // GROUP).to(tl.int64) * stride_kh
    v_head_ptr = v_ptr + begin * stride_vt + (head // GROUP).to(tl.int64) * stride_vh

    first_key, end_key = 0, length
    if WINDOW > 0:
        first_key = tl.maximum(first - WINDOW, 0) // BLOCK_N * BLOCK_N
        end_key = tl.minimum(first + BLOCK_M + WINDOW, length)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(first_key, end_key, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        mask_n = keys < length
        offs_n = keys.to(tl.int64)
        k = tl.load(k_head_ptr + offs_n[None, :] * stride_kt + offs_d[:, None], mask_d[:, None] & mask_n[None, :], 0.0)
        v = tl.load(v_head_ptr + offs_n[:, None] * stride_vt + offs_d[None, :], mask_n[:, None] & mask_d[None, :], 0.0)
        products = tl.dot(q, k, input_precision=INPUT_PRECISION) * scale
        distances = keys[None, :] - queries[:, None]
        visible = mask_n[None, :] & mask_m[:, None]
        if bias_ptr is not None:
            places = head * bias_size + bias_size // 2 + distances
            products += tl.load(bias_ptr + places, mask=visible, other=0.0) * 1.4426950408889634
        if WINDOW > 0:
            visible = visible & (distances <= WINDOW) & (distances >= -WINDOW)
        products = tl.where(visible, products, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(products, axis=1))
        # Of a row that has seen no key yet -inf - -inf would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_safe)
        p = tl.exp2(products - m_safe[:, None])
        l_i = tl.fma(l_i, alpha, tl.sum(p, axis=1))
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=INPUT_PRECISION)
        m_i = m_new
    out = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    out_offs = (begin + queries)[:, None] * stride_ot + head.to(tl.int64) * stride_oh + offs_d[None, :]
    tl.store(out_ptr + out_offs, out.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_d[None, :])


def default_config(head_dim: int, element_size: int) -> dict[str, int]:
    """Reasoned, not measured yet: as prompts over the cache have it, see prefill_attention.py. It must not depend on
    the batch."""
    if element_size == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    if head_dim > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_M": 64, "BLOCK_N": 32 if head_dim > 64 else 64, "num_warps": 4, "num_stages": 2}


def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    max_len: int,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """Launch attention in both directions; see `inflight_kernels.bidirectional_attention`."""
    check_float("q", q)
    if q.dim() != 3 or k.dim() != 3 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q and k must be (num_tokens, heads, head_dim), {tuple(q.shape)} and {tuple(k.shape)} heads that share "
            "keys evenly"
        )
    num_tokens, num_heads, head_dim = q.shape
    for name, part in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, part, q.dtype)
        check_unit_stride(name, part)
    for name, part in (("k", k), ("v", v)):
        check_shape(name, part, (num_tokens, k.shape[1], head_dim))
    batch = starts.shape[0] - 1
    check_vector("starts", starts, batch + 1, torch.int32)
    check_scales(scale, 1.0, 1.0, window, 0.0)
    if bias is not None:
        check_dtype("bias", bias, torch.float32)
        check_shape("bias", bias, (num_heads, bias.shape[-1]))
        if bias.shape[1] < 2 * max_len - 1 or bias.shape[1] % 2 == 0 or not bias.is_contiguous():
            raise ValueError(
                f"bias must be contiguous and have 2 P - 1 columns for P >= {max_len}, got {bias.shape[1]}"
            )
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if batch == 0 or max_len == 0:
        return out
    config = default_config(head_dim, q.element_size())
    bidirectional_attention_kernel[(cdiv(max_len, config["BLOCK_M"]), num_heads, batch)](
        q,
        k,
        v,
        starts,
        bias,
        out,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        0 if bias is None else bias.shape[1],
        GROUP=num_heads // k.shape[1],
        HEAD_DIM=head_dim,
        WINDOW=window,
        # As in prefill_attention.
        INPUT_PRECISION="ieee",
        BLOCK_D=max(next_power_of_2(head_dim), 16),
        **config,
    )
    return out
