"""Paged attention in torch: gather a sequence's blocks, then scaled dot-product attention.

Knows no scheduler: block tables and lengths say everything. Reads lengths on the host, which on a CPU costs nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """Blocks (batch, n) of a cache as (batch, n * block_size, Hkv, D)."""
    batch, num_blocks = blocks.shape
    # index_select copies whole blocks: three times as fast here as advanced indexing.
    return cache.index_select(0, blocks.reshape(-1)).view(batch, num_blocks * cache.shape[1], *cache.shape[2:])


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """One query token a sequence; the batch is padded to its longest sequence. `scratch` is not needed here."""
    batch, num_heads, head_dim = q.shape
    lengths: list[int] = seq_lens.tolist()
    longest = max(lengths, default=0)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if longest == 0:
        return out.zero_()
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    # Blocks before the window of every sequence are not worth a copy.
    shortest_start = max(min(lengths) - sliding_window, 0) // block_size if sliding_window else 0
    first_key = shortest_start * block_size
    blocks = block_table[:, shortest_start : -(-longest // block_size)]
    k = _gather(k_cache, blocks)[:, : longest - first_key].transpose(1, 2)
    v = _gather(v_cache, blocks)[:, : longest - first_key].transpose(1, 2)
    mask = None
    if min(lengths) < longest or 0 < sliding_window < longest:
        keys = torch.arange(first_key, longest, device=q.device)
        visible = keys < seq_lens[:, None]
        if sliding_window:
            visible &= keys >= seq_lens[:, None] - sliding_window
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
        mask = mask[:, None, None, :]
    grouped = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    out.copy_(attended.reshape(q.shape))
    if min(lengths) == 0:
        out.masked_fill_((seq_lens == 0)[:, None, None], 0.0)
    return out


def _chunk_mask(query_len: int, seq_len: int, window: int, first_key: int, device: torch.device) -> Tensor:
    """(query_len, seq_len - first_key) bool: which keys each of the last query_len positions sees."""
    queries = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    keys = torch.arange(first_key, seq_len, device=device)[None, :]
    visible = keys <= queries
    if window:
        visible &= keys > queries - window
    return visible


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Ragged query chunks, one sequence at a time: chunks are long enough that a loop costs little."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_size = k_cache.shape[1]
    starts: list[int] = query_start_loc.tolist()
    lengths: list[int] = seq_lens.tolist()
    for row, seq_len in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        query_len = end - begin
        if query_len == 0:
            continue
        first_visible = max(seq_len - query_len - sliding_window + 1, 0) if sliding_window else 0
        first_block = first_visible // block_size
        first_key = first_block * block_size
        blocks = block_table[row : row + 1, first_block : -(-seq_len // block_size)]
        k = _gather(k_cache, blocks)[:, : seq_len - first_key].transpose(1, 2)
        v = _gather(v_cache, blocks)[:, : seq_len - first_key].transpose(1, 2)
        windowed = 0 < sliding_window < seq_len
        is_whole_prompt = query_len == seq_len and not windowed
        mask = None
        if not is_whole_prompt and (query_len > 1 or windowed):
            mask = _chunk_mask(query_len, seq_len, sliding_window, first_key, q.device)
        attended = F.scaled_dot_product_attention(
            q[None, begin:end].transpose(1, 2),
            k,
            v,
            attn_mask=mask,
            is_causal=is_whole_prompt and query_len > 1,
            scale=scale,
            enable_gqa=True,
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out
