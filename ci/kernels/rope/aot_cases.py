"""Rotation and KV write in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ci.kernels.meta_tensors import bf16, of, show
from inflight_kernels.rope import gpu
from inflight_kernels.rope.gpu.rope_kv_write import CANDIDATES
from inflight_kernels.rope.gpu.rope_latent_write import CANDIDATES as LATENT_CANDIDATES


def _rope(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    with_norm: bool,
    rotary_dim: int = 0,
    cache_dtype: torch.dtype = torch.bfloat16,
    norm_dtype: torch.dtype = torch.bfloat16,
    config: Mapping[str, int] | None = None,
    adjacent_pairs: bool = False,
) -> None:
    tokens = 64
    qkv = bf16(tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], 1)
    cache = of(cache_dtype, 1024, 64, num_kv_heads, head_dim)
    index = of(torch.int64, tokens)
    table = of(torch.float32, 8192, rotary_dim or head_dim)
    norms = (of(norm_dtype, head_dim), of(norm_dtype, head_dim)) if with_norm else ()
    scale: float | Tensor = 0.5 if cache_dtype == torch.float8_e4m3fn else 1.0
    if cache_dtype == torch.int8:
        scale = of(torch.float32, 1024, 64, num_kv_heads)
    options = {"k_scale": scale, "v_scale": scale, "adjacent_pairs": adjacent_pairs, "config": config}
    gpu.rope_and_kv_write(q, k, v, table, index, cache, cache, index, *norms, **options)


def _queries(num_heads: int, head_dim: int, norm_dtype: torch.dtype) -> None:
    q, index = bf16(64, num_heads, head_dim), of(torch.int64, 64)
    gpu.rope(q, of(torch.float32, 8192, head_dim), index, of(norm_dtype, head_dim))


def _latent(
    num_heads: int,
    cache_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    adjacent_pairs: bool = True,
    config: Mapping[str, int] | None = None,
) -> None:
    """Of DeepSeek's sizes."""
    tokens, size, rotary_dim = 64, 512, 64
    q, latent = of(dtype, tokens, num_heads, 192)[..., 128:], of(dtype, tokens, 1536 + size + rotary_dim)[:, 1536:]
    out = of(dtype, tokens, num_heads, size + rotary_dim)[..., size:]
    cache, index = of(cache_dtype, 1024, 64, 1, size + rotary_dim), of(torch.int64, tokens)
    scale: float | Tensor = 0.5 if cache_dtype == torch.float8_e4m3fn else 1.0
    if cache_dtype == torch.int8:
        scale = of(torch.float32, 1024, 64, 1)
    gpu.rope_and_latent_write(
        q, latent, of(dtype, size), 1e-6, of(torch.float32, 8192, rotary_dim), index, cache, index, out, scale,
        adjacent_pairs, config=config,
    )  # fmt: skip


CASES = {
    "latent 128": partial(_latent, 128),
    "latent 16 halves": partial(_latent, 16, adjacent_pairs=False),
    "latent 20 fp32": partial(_latent, 20, torch.float32, torch.float32),
    "latent 128 fp8": partial(_latent, 128, torch.float8_e4m3fn),
    "latent 128 int8": partial(_latent, 128, torch.int8),
    "rope 32/8 d128": partial(_rope, 32, 8, 128, False),
    "rope+qk-norm 32/8 d128": partial(_rope, 32, 8, 128, True),
    "rope+qk-norm 32/8 d128 float32 weights": partial(_rope, 32, 8, 128, True, norm_dtype=torch.float32),
    "rope+qk-norm 16/8 d128": partial(_rope, 16, 8, 128, True),
    "rope 9/3 d64": partial(_rope, 9, 3, 64, False),
    "rope half 32/32 d80": partial(_rope, 32, 32, 80, False, 32),
    "rope of adjacent pairs, half 32/2 d128": partial(_rope, 32, 2, 128, False, 64, adjacent_pairs=True),
    "rope of queries alone 8 d512": partial(_queries, 8, 512, torch.float32),
    "rope+qk-norm 8/1 d512 float32 weights": partial(_rope, 8, 1, 512, True, norm_dtype=torch.float32),
    "rope+fp8 32/8 d128": partial(_rope, 32, 8, 128, False, 0, torch.float8_e4m3fn),
    "rope+qk-norm+int8 32/8 d128": partial(_rope, 32, 8, 128, True, 0, torch.int8),
    "rope+qk-norm+fp8 32/8 d128": partial(_rope, 32, 8, 128, True, 0, torch.float8_e4m3fn),
}
for _config in CANDIDATES:
    CASES[f"rope+qk-norm 32/8 d128 {show(_config)}"] = partial(_rope, 32, 8, 128, True, config=_config)
for _config in LATENT_CANDIDATES:
    CASES[f"latent 128 {show(_config)}"] = partial(_latent, 128, config=_config)
NEEDS = {name: 89 for name in CASES if "fp8" in name}
