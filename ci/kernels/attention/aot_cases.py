"""Attention over the paged cache: decode and prefill, each candidate and each kind of cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ci.kernels.meta_tensors import of, show
from inflight_kernels.attention import gpu
from inflight_kernels.attention.gpu._attention import FP8
from inflight_kernels.attention.gpu.decode_attention import CANDIDATES as DECODE
from inflight_kernels.attention.gpu.prefill_attention import CANDIDATES as PREFILL


def _beside(cache_dtype: torch.dtype) -> torch.dtype:
    """Type of the queries over such a cache."""
    return torch.bfloat16 if cache_dtype.itemsize == 1 else cache_dtype


def _scale(cache: Tensor) -> float | Tensor:
    """Of such a cache's keys or values."""
    return of(torch.float32, *cache.shape[:3]) if cache.dtype == torch.int8 else 1.0


def _values(cache: Tensor, value_dim: int) -> Tensor:
    """Another cache like it, or the first elements of its keys."""
    return cache[..., :value_dim] if value_dim else cache


def _latents(
    attend: Callable[..., None], rows: int, num_heads: int, block_size: int, **options: Any
) -> Callable[[], None]:
    """Of DeepSeek's size."""
    return partial(attend, rows, num_heads, 1, 576, block_size, value_dim=512, **options)


def _decode(
    batch: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    deterministic: bool = False,
    soft_cap: float = 0.0,
    has_sinks: bool = False,
    value_dim: int = 0,
    config: Mapping[str, int] | None = None,
) -> None:
    cache = of(dtype, 1024, block_size, num_kv_heads, head_dim)
    table = of(torch.int32, batch, 8192 // block_size)
    q = of(_beside(dtype), batch, num_q_heads, head_dim)
    lengths = of(torch.int32, batch)
    rows, scale = of(torch.int64, batch), _scale(cache)
    gpu.decode_attention(
        q, cache, _values(cache, value_dim), table, lengths, 0.1, window,
        table_rows=rows, k_scale=scale, v_scale=scale, deterministic=deterministic, soft_cap=soft_cap,
        sinks=of(torch.float32, num_q_heads) if has_sinks else None, config=config,
    )  # fmt: skip


def _prefill(
    max_query_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    deterministic: bool = False,
    soft_cap: float = 0.0,
    has_sinks: bool = False,
    value_dim: int = 0,
    config: Mapping[str, int] | None = None,
) -> None:
    cache = of(dtype, 1024, block_size, num_kv_heads, head_dim)
    table = of(torch.int32, 4, 8192 // block_size)
    q = of(_beside(dtype), 4 * max_query_len, num_q_heads, head_dim)
    starts, lengths, rows = of(torch.int32, 5), of(torch.int32, 4), of(torch.int64, 4)
    scale = _scale(cache)
    gpu.prefill_attention(
        q,
        cache,
        _values(cache, value_dim),
        table,
        starts,
        lengths,
        max_query_len,
        0.1,
        window,
        table_rows=rows,
        k_scale=scale,
        v_scale=scale,
        deterministic=deterministic,
        soft_cap=soft_cap,
        sinks=of(torch.float32, num_q_heads) if has_sinks else None,
        config=config,
    )


def _both_ways(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    has_bias: bool = False,
) -> None:
    q, k, v = (of(dtype, 2048, heads, head_dim) for heads in (num_q_heads, num_kv_heads, num_kv_heads))
    bias = of(torch.float32, num_q_heads, 1023) if has_bias else None
    gpu.bidirectional_attention(q, k, v, of(torch.int32, 5), 512, 0.1, window, bias)


CASES: dict[str, Callable[[], None]] = {
    "decode b1 32/8 d128 block64": partial(_decode, 1, 32, 8, 128, 64),
    "decode b32 32/8 d128 block64": partial(_decode, 32, 32, 8, 128, 64),
    "decode b32 32/8 d128 block64 fp8": partial(_decode, 32, 32, 8, 128, 64, dtype=FP8),
    "decode b1 32/8 d128 block64 fp8": partial(_decode, 1, 32, 8, 128, 64, dtype=FP8),
    "decode b32 32/8 d128 block64 window": partial(_decode, 32, 32, 8, 128, 64, window=4096),
    "decode b32 32/8 d128 block64 deterministic": partial(_decode, 32, 32, 8, 128, 64, deterministic=True),
    "decode b32 32/8 d128 block16 fp16": partial(_decode, 32, 32, 8, 128, 16, dtype=torch.float16),
    "decode b32 32/8 d128 block16 fp32": partial(_decode, 32, 32, 8, 128, 16, dtype=torch.float32),
    "decode b256 32/8 d128 block16": partial(_decode, 256, 32, 8, 128, 16),
    "decode b4 9/3 d64 block64": partial(_decode, 4, 9, 3, 64, 64),
    "decode b32 32/8 d128 block64 int8": partial(_decode, 32, 32, 8, 128, 64, dtype=torch.int8),
    "decode b4 9/3 d64 block64 fp8": partial(_decode, 4, 9, 3, 64, 64, dtype=FP8),
    "decode b4 32/8 d96 block64": partial(_decode, 4, 32, 8, 96, 64),
    "decode b4 64/1 d128 block64": partial(_decode, 4, 64, 1, 128, 64),
    "decode b4 8/1 d256 block64": partial(_decode, 4, 8, 1, 256, 64),
    "decode b4 8/1 d512 block64": partial(_decode, 4, 8, 1, 512, 64),
    "prefill 8/1 d512 block64": partial(_prefill, 2048, 8, 1, 512, 64),
    "prefill 8/1 d512 block64 fp32": partial(_prefill, 2048, 8, 1, 512, 64, dtype=torch.float32),
    "prefill 8/1 d512 block64 int8": partial(_prefill, 2048, 8, 1, 512, 64, dtype=torch.int8),
    "prefill 8/1 d512 block64 fp8": partial(_prefill, 2048, 8, 1, 512, 64, dtype=FP8),
    "decode b4 8/1 d512 block64 int8": partial(_decode, 4, 8, 1, 512, 64, dtype=torch.int8),
    "decode b4 8/1 d512 block64 fp8": partial(_decode, 4, 8, 1, 512, 64, dtype=FP8),
    # Gemma 2 9B and gpt-oss.
    "decode b32 16/8 d256 block64 window cap": partial(_decode, 32, 16, 8, 256, 64, window=4096, soft_cap=50.0),
    "decode b1 16/8 d256 block64 cap": partial(_decode, 1, 16, 8, 256, 64, soft_cap=50.0),
    "decode b32 64/8 d64 block64 window sinks": partial(_decode, 32, 64, 8, 64, 64, window=128, has_sinks=True),
    "decode b1 64/8 d64 block64 sinks": partial(_decode, 1, 64, 8, 64, 64, has_sinks=True),
    "prefill 32/8 d128 block64": partial(_prefill, 2048, 32, 8, 128, 64),
    "prefill 32/8 d128 block64 fp8": partial(_prefill, 2048, 32, 8, 128, 64, dtype=FP8),
    "prefill 32/8 d128 block64 int8": partial(_prefill, 2048, 32, 8, 128, 64, dtype=torch.int8),
    "prefill 32/8 d128 block64 window": partial(_prefill, 2048, 32, 8, 128, 64, window=4096),
    "prefill 32/8 d128 block64 deterministic": partial(_prefill, 8, 32, 8, 128, 64, deterministic=True),
    "prefill 32/8 d128 block16": partial(_prefill, 2048, 32, 8, 128, 16),
    "prefill 32/8 d128 block16 fp16": partial(_prefill, 2048, 32, 8, 128, 16, dtype=torch.float16),
    "prefill 32/8 d128 block16 fp32": partial(_prefill, 2048, 32, 8, 128, 16, dtype=torch.float32),
    "prefill 9/3 d64 block64": partial(_prefill, 2048, 9, 3, 64, 64),
    "prefill 32/8 d96 block64": partial(_prefill, 2048, 32, 8, 96, 64),
    "prefill 8/1 d256 block64": partial(_prefill, 2048, 8, 1, 256, 64),
    "prefill 16/8 d256 block64 window cap": partial(_prefill, 2048, 16, 8, 256, 64, window=4096, soft_cap=50.0),
    "prefill 64/8 d64 block64 window sinks": partial(_prefill, 2048, 64, 8, 64, 64, window=128, has_sinks=True),
    "prefill short 32/8 d128 block64": partial(_prefill, 8, 32, 8, 128, 64),
    # DeepSeek-V3 and V2-Lite, GLM-4.7-Flash.
    "decode b32 128/1 d576:512 block64": _latents(_decode, 32, 128, 64),
    "decode b1 128/1 d576:512 block16": _latents(_decode, 1, 128, 16),
    "decode b32 16/1 d576:512 block64": _latents(_decode, 32, 16, 64),
    "decode b1 20/1 d576:512 block64": _latents(_decode, 1, 20, 64),
    "decode b32 16/1 d576:512 block64 fp32": _latents(_decode, 32, 16, 64, dtype=torch.float32),
    "decode b32 128/1 d576:512 block64 fp8": _latents(_decode, 32, 128, 64, dtype=FP8),
    "decode b32 128/1 d576:512 block64 int8": _latents(_decode, 32, 128, 64, dtype=torch.int8),
    "decode b32 128/1 d576:512 block64 deterministic": _latents(_decode, 32, 128, 64, deterministic=True),
    "prefill 128/1 d576:512 block64": _latents(_prefill, 2048, 128, 64),
    "prefill 16/1 d576:512 block16": _latents(_prefill, 2048, 16, 16),
    "prefill 20/1 d576:512 block64 fp32": _latents(_prefill, 2048, 20, 64, dtype=torch.float32),
    "prefill 128/1 d576:512 block64 fp8": _latents(_prefill, 2048, 128, 64, dtype=FP8),
    "prefill 128/1 d576:512 block64 int8": _latents(_prefill, 2048, 128, 64, dtype=torch.int8),
    # BERT, MPNet, ModernBERT, and heads that are larger.
    "both ways 12/12 d64": partial(_both_ways, 12, 12, 64),
    "both ways 12/12 d64 fp16": partial(_both_ways, 12, 12, 64, dtype=torch.float16),
    "both ways 12/12 d64 fp32": partial(_both_ways, 12, 12, 64, dtype=torch.float32),
    "both ways 12/12 d64 bias": partial(_both_ways, 12, 12, 64, has_bias=True),
    "both ways 12/12 d64 window": partial(_both_ways, 12, 12, 64, window=64),
    "both ways 12/12 d32": partial(_both_ways, 12, 12, 32),
    "both ways 8/2 d128": partial(_both_ways, 8, 2, 128),
    "both ways 8/1 d256": partial(_both_ways, 8, 1, 256),
    **{f"decode b32 {show(config)}": partial(_decode, 32, 32, 8, 128, 64, config=config) for config in DECODE},
    **{f"prefill {show(config)}": partial(_prefill, 2048, 32, 8, 128, 64, config=config) for config in PREFILL},
    "decode b32 fp8 " + show(DECODE[2]): partial(_decode, 32, 32, 8, 128, 64, dtype=FP8, config=DECODE[2]),
}
# The largest tiles hold the queries in shared memory, which only wgmma and tcgen05 can read them from.
HOPPER = PREFILL[:3]
NEEDS = {name: 89 for name in CASES if "fp8" in name} | {f"prefill {show(config)}": 90 for config in HOPPER}
# Registers for two programs on a multiprocessor suffice where accumulators and products stay in them.
NEWEST = {f"prefill {show(config)}": 90 for config in PREFILL if config["maxnreg"]}
