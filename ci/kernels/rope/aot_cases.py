"""Rotation and KV write in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ci.kernels.meta_tensors import bf16, of, show
from inflight_kernels.rope import gpu
from inflight_kernels.rope.gpu.rope_kv_write import CANDIDATES


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


CASES = {
    "rope 32/8 d128": partial(_rope, 32, 8, 128, False),
    "rope+qk-norm 32/8 d128": partial(_rope, 32, 8, 128, True),
    "rope+qk-norm 32/8 d128 float32 weights": partial(_rope, 32, 8, 128, True, norm_dtype=torch.float32),
    "rope+qk-norm 16/8 d128": partial(_rope, 16, 8, 128, True),
    "rope 9/3 d64": partial(_rope, 9, 3, 64, False),
    "rope half 32/32 d80": partial(_rope, 32, 32, 80, False, 32),
    "rope of adjacent pairs, half 32/2 d128": partial(_rope, 32, 2, 128, False, 64, adjacent_pairs=True),
    "rope+fp8 32/8 d128": partial(_rope, 32, 8, 128, False, 0, torch.float8_e4m3fn),
    "rope+qk-norm+int8 32/8 d128": partial(_rope, 32, 8, 128, True, 0, torch.int8),
    "rope+qk-norm+fp8 32/8 d128": partial(_rope, 32, 8, 128, True, 0, torch.float8_e4m3fn),
}
for _config in CANDIDATES:
    CASES[f"rope+qk-norm 32/8 d128 {show(_config)}"] = partial(_rope, 32, 8, 128, True, config=_config)
NEEDS = {name: 89 for name in CASES if "fp8" in name}
