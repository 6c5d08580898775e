"""Attention over the paged cache: decode and prefill."""

from __future__ import annotations

import torch

from inflight_kernels import ops

from ._meta import bf16, of


def _decode(batch: int, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int = 0) -> None:
    cache = bf16(1024, block_size, num_kv_heads, head_dim)
    table = of(torch.int32, batch, 8192 // block_size)
    q = bf16(batch, num_q_heads, head_dim)
    ops.decode_attention(q, cache, cache, table, of(torch.int32, batch), 0.1, window)


def _prefill(
    max_query_len: int, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int = 0
) -> None:
    cache = bf16(1024, block_size, num_kv_heads, head_dim)
    table = of(torch.int32, 4, 8192 // block_size)
    q = bf16(4 * max_query_len, num_q_heads, head_dim)
    starts, lengths = of(torch.int32, 5), of(torch.int32, 4)
    ops.prefill_attention(q, cache, cache, table, starts, lengths, max_query_len, 0.1, window)


CASES = {
    "decode b4 32/8 d128 block64": lambda: _decode(4, 32, 8, 128, 64),
    "decode b256 32/8 d128 block16": lambda: _decode(256, 32, 8, 128, 16),
    "decode b4 9/3 d64 block64": lambda: _decode(4, 9, 3, 64, 64),
    "decode b4 32/8 d128 block64 window": lambda: _decode(4, 32, 8, 128, 64, 4096),
    "prefill 32/8 d128 block64": lambda: _prefill(2048, 32, 8, 128, 64),
    "prefill 32/8 d128 block16": lambda: _prefill(2048, 32, 8, 128, 16),
    "prefill 9/3 d64 block64": lambda: _prefill(2048, 9, 3, 64, 64),
    "prefill short 32/8 d128 block64": lambda: _prefill(8, 32, 8, 128, 64),
    "prefill 32/8 d128 block64 window": lambda: _prefill(2048, 32, 8, 128, 64, 4096),
}
