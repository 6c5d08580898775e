"""Code shared by decode and prefill attention: the loop over tiles of keys, and the argument checks.

Both operations, and masked and unmasked tiles, use the same arithmetic: the maximum is taken of the raw products, and
each probability is 2^(fma(product, scale, -maximum)) with an explicit fma, so that the compiler cannot fuse one loop
differently from another. A mask that hides nothing changes no bit of the result, and a tile that is wholly masked for a
row leaves that row's state unchanged: `deterministic` relies on both.

The entry of the block table is read one tile ahead, by the loop itself. A lookup within the iteration would be a load
that the loads of K and V depend on, and triton would spend half of the stages on it: of three, none would be left to
copy a tile while another is multiplied.

An fp8 cache holds k / k_scale and v / v_scale: k_scale is multiplied into the scale of the products, v_scale into the
final result. Keys are converted to q's dtype before the product. Values are converted to float16 if q has 16 bits:
float16 represents every e4m3 number exactly and takes one conversion instruction per pair, bfloat16 three; and
probabilities, at most 1, lose less precision in float16 than in bfloat16.

An int8 cache has a scale for each slot and head. A key or value is multiplied by its own and rounded to q's dtype
before the product. Of latents what a row is multiplied to is multiplied by its scale instead, so that rows of 512 need
not be float32 in registers.

Values may be the first elements of the keys (LATENT: one key head of DeepSeek's latents). Then a tile of them is read
once, for both products, and what keys have behind them (the tail) is multiplied by itself. All query heads share the
key head; programs have at most MOST_HEADS of them each, as if that many shared one of several key heads that lie at the
same place.

With a soft cap the products become their tanh before they are masked, and the cap is the scale of what follows. A sink
is no key: it is added to a row's sum of weights where the row is written, which one program does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import (
    check_dtype,
    check_float,
    check_kv_cache,
    check_shape,
    check_slot_scales,
    check_unit_stride,
    check_vector,
    compute_capability,
    next_power_of_2,
)

LOG2_E = math.log2(math.e)
FP8 = torch.float8_e4m3fn
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _tanh(x):
    """Of x / (2 log2 e): 1 - 2 / (2 ** x + 1), with an absolute error of a few 2 ** -23."""
    return tl.fma(1.0 / (tl.exp2(x) + 1.0), -2.0, 1.0)


@triton.jit
def sum_with_sinks(m_i, l_i, sinks_ptr, heads, mask):
    """The sum of the weights of each row that has seen a key, that of the sink of its head included. A sink far above
    all scores makes it infinite, and so the output 0."""
    if sinks_ptr is not None:
        l_i += tl.exp2(tl.fma(tl.load(sinks_ptr + heads, mask=mask, other=0.0), _LOG2_E, -m_i))
    return l_i


@triton.jit
def load_queries(q_ptrs, mask_rows, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """Elements FIRST to END of the queries whose first elements are at `q_ptrs` (rows, 1)."""
    offs = FIRST + tl.arange(0, BLOCK)
    return tl.load(q_ptrs + offs[None, :], mask=mask_rows[:, None] & (offs < END)[None, :], other=0.0)


@triton.jit
def attend_tiles(
    acc, m_i, l_i, q, q_tail, query_positions, seq_len, tile_begin, tile_end, k_head_ptr, v_head_ptr, k_scales_head_ptr,
    v_scales_head_ptr, table_row_ptr, stride_cache_block, stride_cache_offset, qk_scale, tanh_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLIDING_WINDOW: tl.constexpr,
    MASKED: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Add key tiles [tile_begin, tile_end) to the running softmax. MASKED: some key may be hidden from some row. The
    scales lie as the heads of a contiguous cache do; None = it has none. `qk_scale`: of the products, or of their tanh
    (tanh_scale, see `score_scales`). BLOCK_TAIL: 0 = values are not the first elements of the keys."""
    LATENT: tl.constexpr = BLOCK_TAIL > 0
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < VALUE_DIM
    OF_BYTES: tl.constexpr = v_head_ptr.dtype.element_ty.primitive_bitwidth == 8
    HAS_SCALES: tl.constexpr = k_scales_head_ptr is not None
    AS_FLOAT16: tl.constexpr = OF_BYTES and not HAS_SCALES and not LATENT and q.dtype.primitive_bitwidth == 16
    VALUE_DTYPE: tl.constexpr = tl.float16 if AS_FLOAT16 else q.dtype
    # A tile within one block needs one entry of the table. Otherwise each key has its own; keys past the sequence's end
    # may have none: they read block 0 and are masked.
    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    if ONE_BLOCK:
        next_block = tl.load(table_row_ptr + tile_begin * BLOCK_N // BLOCK_SIZE, mask=tile_begin < tile_end, other=0)
    else:
        next_keys = tile_begin * BLOCK_N + offs_n
        next_block = tl.load(table_row_ptr + next_keys // BLOCK_SIZE, mask=next_keys < seq_len, other=0)
    for tile in tl.range(tile_begin, tile_end):
        start = tile * BLOCK_N
        keys = start + offs_n
        block = next_block.to(tl.int64)
        if ONE_BLOCK:
            next_block = tl.load(table_row_ptr + (start + BLOCK_N) // BLOCK_SIZE, mask=tile + 1 < tile_end, other=0)
            # Offsets within a block fit int32.
            base = block * stride_cache_block + (start % BLOCK_SIZE) * stride_cache_offset
            places = offs_n * stride_cache_offset
        else:
            next_keys = keys + BLOCK_N
            next_block = tl.load(table_row_ptr + next_keys // BLOCK_SIZE, mask=next_keys < seq_len, other=0)
            base = tl.full([], 0, tl.int64)
            places = block * stride_cache_block + (keys % BLOCK_SIZE) * stride_cache_offset
        if MASKED:
            mask_n = keys < seq_len
            k_mask = mask_n[None, :] & mask_d[:, None]
            v_mask = mask_n[:, None] & mask_d[None, :]
        else:
            k_mask = mask_d[:, None]
            v_mask = mask_d[None, :]
        if not LATENT:
            k = tl.load(k_head_ptr + base + (places[None, :] + offs_d[:, None]), mask=k_mask, other=0.0)
        v = tl.load(v_head_ptr + base + (places[:, None] + offs_d[None, :]), mask=v_mask, other=0.0)
        if LATENT:
            offs_tail = tl.arange(0, BLOCK_TAIL)
            tail_mask = (offs_tail < HEAD_DIM - VALUE_DIM)[:, None]
            if MASKED:
                tail_mask = tail_mask & mask_n[None, :]
            tail_ptrs = k_head_ptr + VALUE_DIM + base + (places[None, :] + offs_tail[:, None])
            k_tail = tl.load(tail_ptrs, mask=tail_mask, other=0.0)
        if HAS_SCALES:
            scale_places = base // HEAD_DIM + places // HEAD_DIM
            k_scales = tl.load(k_scales_head_ptr + scale_places, mask=keys < seq_len, other=0.0)
            if not LATENT:
                v_scales = tl.load(v_scales_head_ptr + scale_places, mask=keys < seq_len, other=0.0)
                k = k.to(tl.float32) * k_scales[None, :]
                v = v.to(tl.float32) * v_scales[:, None]
        v = v.to(VALUE_DTYPE)
        k = tl.trans(v) if LATENT else k.to(q.dtype)
        if OF_BYTES and not LATENT:
            # Changes no value. Triton would load values in the layout of the product's operand, which has neighbours of
            # a column in a thread: bytes one by one. It carries no layout across a split: they are loaded along rows,
            # 16 at a time, and go through shared memory as float16.
            even, odd = tl.split(tl.reshape(v, [BLOCK_N, BLOCK_D // 2, 2]))
            v = tl.interleave(even, odd)
        products = tl.dot(q, k, input_precision=INPUT_PRECISION)
        if LATENT:
            products = tl.dot(q_tail, k_tail.to(q.dtype), products, input_precision=INPUT_PRECISION)
            if HAS_SCALES:
                products = products * k_scales[None, :]
        if tanh_scale is not None:
            products = _tanh(products * tanh_scale)
        if MASKED:
            if SLIDING_WINDOW > 0:
                # One difference for both bounds takes fewer registers than two comparisons of positions.
                distances = query_positions[:, None] - keys[None, :]
                visible = (distances >= 0) & (distances < SLIDING_WINDOW)
            else:
                visible = keys[None, :] <= query_positions[:, None]
            products = tl.where(visible, products, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(products, axis=1) * qk_scale)
        m_safe = m_new
        if MASKED:
            # If all keys so far are hidden from a row, its maximum is -inf, and -inf - -inf would be NaN.
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_safe)
        p = tl.exp2(tl.fma(products, qk_scale, -m_safe[:, None]))
        l_i = tl.fma(l_i, alpha, tl.sum(p, axis=1))
        if LATENT and HAS_SCALES:
            p = p * k_scales[None, :]
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=INPUT_PRECISION)
        m_i = m_new
    return acc, m_i, l_i


# 512 floats a row of output: 64 rows spill up to 3.8 KB, 32 take 170 registers of 8 warps (ptxas, triton 3.7).
MOST_HEADS = 32
MOST_HEADS_OF_FLOAT32 = 16


class KeyHeads(NamedTuple):
    """How a launch deals out query heads: `count` groups of `group` heads, and what lies between two groups' keys."""

    count: int
    group: int
    stride: int
    is_latent: bool
    """Values are the first elements of the keys."""

    @classmethod
    def of(cls, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> KeyHeads:
        """Those of a cache, or of latents."""
        num_q_heads, num_kv_heads = q.shape[1], k_cache.shape[2]
        if k_cache.shape == v_cache.shape:
            return cls(num_kv_heads, num_q_heads // num_kv_heads, k_cache.stride(2), is_latent=False)
        most = MOST_HEADS_OF_FLOAT32 if q.element_size() == 4 else MOST_HEADS
        group = max(size for size in range(1, most + 1) if num_q_heads % size == 0)
        return cls(num_q_heads // group, group, 0, is_latent=True)

    def size(self, head_dim: int, value_dim: int) -> str:
        """What a table of configurations calls them by."""
        return f"{value_dim} of {head_dim}" if self.is_latent else str(head_dim)

    def tiles(self, head_dim: int, value_dim: int) -> dict[str, int]:
        """Sizes of what a kernel holds of a key."""
        block_tail = max(next_power_of_2(head_dim - value_dim), 16) if self.is_latent else 0
        return {"BLOCK_D": max(next_power_of_2(value_dim), 16), "BLOCK_TAIL": block_tail}


def launch_options(config: Mapping[str, int]) -> dict[str, int]:
    """The compiler's options of a configuration. maxnreg, registers a thread: 0 = the assembler's choice."""
    names = ("num_warps", "num_stages", "maxnreg") if config["maxnreg"] else ("num_warps", "num_stages")
    return {name: config[name] for name in names}


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: tuple[float | Tensor, float | Tensor],
    block_table: Tensor,
    table_rows: Tensor | None,
    batch: int,
    out: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Raise ValueError unless the shapes and dtypes of q (n, Hq, D), caches, table of `batch` sequences, `out` and
    sinks match, and values that are smaller than keys are their first elements."""
    check_float("q", q)
    if q.dim() != 3:
        raise ValueError(f"q must be (num_tokens, num_heads, head_dim), got {tuple(q.shape)}")
    check_unit_stride("q", q)
    cache_dtype = k_cache.dtype if k_cache.dtype in (FP8, torch.int8) else q.dtype
    if k_cache.dtype == FP8:
        capability = compute_capability(q.device)
        if capability < 89:
            raise ValueError(f"a float8_e4m3fn KV cache needs sm_89 or later, {q.device} is sm_{capability}")
    if k_cache.shape != v_cache.shape:
        check_latents(k_cache, v_cache, scales)
    check_kv_cache(k_cache, k_cache if k_cache.shape != v_cache.shape else v_cache, None, q.shape[2], cache_dtype)
    check_slot_scales(k_cache, scales)
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_cache.shape[2]} KV heads evenly")
    check_dtype("block_table", block_table, torch.int32)
    if block_table.dim() != 2 or (table_rows is None and block_table.shape[0] != batch):
        raise ValueError(f"block_table must be (batch {batch}, max_blocks), got {tuple(block_table.shape)}")
    if table_rows is not None:
        check_vector("table_rows", table_rows, batch, torch.int64)
    check_unit_stride("block_table", block_table)
    if out is not None:
        check_shape("out", out, (*q.shape[:2], v_cache.shape[-1]))
        check_dtype("out", out, q.dtype)
        check_unit_stride("out", out)
    if sinks is not None:
        check_vector("sinks", sinks, q.shape[1], torch.float32)


def check_latents(k_cache: Tensor, v_cache: Tensor, scales: tuple[float | Tensor, float | Tensor]) -> None:
    """Raise ValueError unless `v_cache` is a view of the first elements of each key of the only key head."""
    expected = k_cache[..., : v_cache.shape[-1]]
    is_view = v_cache.shape == expected.shape and v_cache.stride() == expected.stride()
    is_view = is_view and v_cache.storage_offset() == expected.storage_offset()
    if not is_view or v_cache.untyped_storage()._cdata != k_cache.untyped_storage()._cdata or k_cache.shape[2] != 1:
        raise ValueError(
            "values that are not as large as keys must be the first elements of these, of one KV head, got caches of "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    k_scale, v_scale = scales
    if k_scale is not v_scale and (isinstance(k_scale, Tensor) or k_scale != v_scale):
        raise ValueError("k_scale and v_scale of values that are part of the keys must be the same")


def slot_scales(k_scale: float | Tensor, v_scale: float | Tensor) -> tuple[float, float, Tensor | None, Tensor | None]:
    """The scales of all keys and all values, and those of each slot."""
    if isinstance(k_scale, Tensor) and isinstance(v_scale, Tensor):
        return 1.0, 1.0, k_scale, v_scale
    assert not isinstance(k_scale, Tensor) and not isinstance(v_scale, Tensor)
    return k_scale, v_scale, None, None


def score_scales(scale: float, k_scale: float, soft_cap: float) -> tuple[float, float | None]:
    """What makes an exponent of 2 of a product of a query and a key, or, with a soft cap, of its tanh; and then what
    multiplies the product inside the tanh."""
    if not soft_cap:
        return scale * k_scale * LOG2_E, None
    return soft_cap * LOG2_E, 2.0 * LOG2_E * scale * k_scale / soft_cap


def check_scales(scale: float, k_scale: float | Tensor, v_scale: float | Tensor, window: int, soft_cap: float) -> None:
    """Raise ValueError for scales that are not positive and finite, or a window or soft cap below 0."""
    for name, value in (("scale", scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if not isinstance(value, Tensor) and not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if window < 0:
        raise ValueError(f"sliding_window must be 0 (off) or positive, got {window}")
    if not 0.0 <= soft_cap < math.inf:
        raise ValueError(f"soft_cap must be 0 (off) or positive and finite, got {soft_cap}")
