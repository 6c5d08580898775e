"""Paged attention in torch: gather a sequence's blocks, then scaled dot-product attention.

Knows no scheduler: block tables and lengths are all that it needs. Reads lengths on the host, which costs nothing on a
CPU. In deterministic mode each query is computed separately, because torch's result of a row depends on the other rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _gather(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks (batch, n) of a cache as (batch, n * block_size, Hkv, D) of `dtype`."""
    batch, num_blocks = blocks.shape
    # index_select copies whole blocks: three times as fast here as advanced indexing.
    gathered = cache.index_select(0, blocks.reshape(-1)).to(dtype)
    return gathered.view(batch, num_blocks * cache.shape[1], *cache.shape[2:])


def _blocks(block_table: Tensor, table_rows: Tensor | None, first: int, end: int) -> Tensor:
    """Blocks `first` to `end` of each sequence, see `inflight_kernels.decode_attention`."""
    blocks = block_table[:, first:end]
    return blocks if table_rows is None else blocks.index_select(0, table_rows)


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
    *,
    table_rows: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    deterministic: bool = False,
) -> Tensor:
    """One query token per sequence; the batch is padded to its longest sequence. `scratch` is not used."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if deterministic and len(q) > 1:
        table = _blocks(block_table, table_rows, 0, block_table.shape[1])
        for row in range(len(q)):
            one = slice(row, row + 1)
            decode_attention(
                q[one], k_cache, v_cache, table[one], seq_lens[one], scale, sliding_window, out[one],
                k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
        return out
    batch, num_heads, head_dim = q.shape
    lengths: list[int] = seq_lens.tolist()
    longest = max(lengths, default=0)
    if longest == 0:
        return out.zero_()
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    # Blocks before the window of every sequence need not be copied.
    shortest_start = max(min(lengths) - sliding_window, 0) // block_size if sliding_window else 0
    first_key = shortest_start * block_size
    blocks = _blocks(block_table, table_rows, shortest_start, -(-longest // block_size))
    k = _gather(k_cache, blocks, q.dtype)[:, : longest - first_key].transpose(1, 2)
    v = _gather(v_cache, blocks, q.dtype)[:, : longest - first_key].transpose(1, 2)
    mask = None
    if min(lengths) < longest or 0 < sliding_window < longest:
        keys = torch.arange(first_key, longest, device=q.device)
        visible = keys < seq_lens[:, None]
        if sliding_window:
            visible &= keys >= seq_lens[:, None] - sliding_window
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
        mask = mask[:, None, None, :]
    grouped = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale * k_scale)
    out.copy_(attended.reshape(q.shape))
    if v_scale != 1.0:
        out.mul_(v_scale)
    if min(lengths) == 0:
        out.masked_fill_((seq_lens == 0)[:, None, None], 0.0)
    return out


def _chunk_mask(query_len: int, seq_len: int, window: int, first_key: int, device: torch.device) -> Tensor:
    """(query_len, seq_len - first_key) bool: keys that are visible to each of the last query_len positions."""
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
    *,
    table_rows: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    deterministic: bool = False,
) -> Tensor:
    """Ragged query chunks, one sequence at a time: chunks are long, so that the loop costs little."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_size = k_cache.shape[1]
    starts: list[int] = query_start_loc.tolist()
    lengths: list[int] = seq_lens.tolist()
    block_table = _blocks(block_table, table_rows, 0, -(-max(lengths, default=0) // block_size))
    for row, seq_len in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        query_len = end - begin
        if query_len == 0:
            continue
        if deterministic:
            table = block_table[row : row + 1].expand(query_len, -1)
            positions = torch.arange(seq_len - query_len + 1, seq_len + 1, dtype=torch.int32, device=q.device)
            decode_attention(
                q[begin:end], k_cache, v_cache, table, positions, scale, sliding_window, out[begin:end],
                k_scale=k_scale, v_scale=v_scale, deterministic=True,
            )  # fmt: skip
            continue
        first_visible = max(seq_len - query_len - sliding_window + 1, 0) if sliding_window else 0
        first_block = first_visible // block_size
        first_key = first_block * block_size
        blocks = block_table[row : row + 1, first_block : -(-seq_len // block_size)]
        k = _gather(k_cache, blocks, q.dtype)[:, : seq_len - first_key].transpose(1, 2)
        v = _gather(v_cache, blocks, q.dtype)[:, : seq_len - first_key].transpose(1, 2)
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
            scale=scale * k_scale,
            enable_gqa=True,
        )
        out[begin:end] = attended[0].transpose(0, 1)
        if v_scale != 1.0:
            out[begin:end].mul_(v_scale)
    return out
