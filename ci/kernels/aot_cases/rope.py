"""Rotation and KV write in one launch."""

from __future__ import annotations

import torch

from inflight_kernels import ops

from ._meta import bf16, of


def _rope(num_q_heads: int, num_kv_heads: int, head_dim: int, with_norm: bool) -> None:
    tokens = 64
    qkv = bf16(tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], 1)
    cache = bf16(1024, 64, num_kv_heads, head_dim)
    index = of(torch.int64, tokens)
    norms = (bf16(head_dim), bf16(head_dim)) if with_norm else ()
    ops.rope_and_kv_write(q, k, v, of(torch.float32, 8192, head_dim), index, cache, cache, index, *norms)


CASES = {
    "rope 32/8 d128": lambda: _rope(32, 8, 128, False),
    "rope+qk-norm 32/8 d128": lambda: _rope(32, 8, 128, True),
    "rope 9/3 d64": lambda: _rope(9, 3, 64, False),
}
