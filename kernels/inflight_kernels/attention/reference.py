"""Paged attention in torch: gather a sequence's blocks, then scaled dot-product attention.

Knows no scheduler: block tables and lengths are all that it needs. Reads lengths on the host, which costs nothing on a
CPU. In deterministic mode each query is computed separately, because torch's result of a row depends on the other rows.
Capped scores and sinks, for which torch's function has no arguments, are computed from the scores, in float32.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def _gather(cache: Tensor, scale: float | Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks (batch, n) of a cache as (batch, n * block_size, Hkv, D) of `dtype`, times the scales of slots."""
    batch, num_blocks = blocks.shape
    # index_select copies whole blocks: three times as fast here as advanced indexing.
    gathered = cache.index_select(0, blocks.reshape(-1))
    if isinstance(scale, Tensor):
        gathered = gathered.float() * scale.index_select(0, blocks.reshape(-1))[..., None]
    return gathered.to(dtype).view(batch, num_blocks * cache.shape[1], *cache.shape[2:])


def _of_all(scale: float | Tensor) -> float:
    """What is left to multiply where the scales of slots, if it has them, have been."""
    return 1.0 if isinstance(scale, Tensor) else scale


def _blocks(block_table: Tensor, table_rows: Tensor | None, first: int, end: int) -> Tensor:
    """Blocks `first` to `end` of each sequence, see `inflight_kernels.decode_attention`."""
    blocks = block_table[:, first:end]
    return blocks if table_rows is None else blocks.index_select(0, table_rows)


# Queries of a chunk whose scores, float32 (Hq, queries, keys), are in memory at the same time.
QUERIES_AT_ONCE = 128


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """Attention with capped scores or sinks: q (batch, Hkv, group, n, D), k and v (batch, Hkv, length, D or Dv) and
    `visible` (batch or 1, n or 1, length) bool, or None, to float32 (batch, Hkv, group, n, Dv)."""
    *heads, num_queries, _ = q.shape
    length = k.shape[2]
    scores = (q.float().flatten(2, 3) @ k.float().mT).view(*heads, num_queries, length) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        of_rows = sinks.view(1, heads[1], heads[2], 1, 1).expand(heads[0], -1, -1, num_queries, -1)
        scores = torch.cat([scores, of_rows], dim=-1)
    weights = scores.softmax(-1)[..., :length]
    return (weights.flatten(2, 3) @ v.float()).view(*q.shape[:-1], -1)


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
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    deterministic: bool = False,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query token per sequence; the batch is padded to its longest sequence. `scratch` is not used."""
    if out is None:
        out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device=q.device)
    if deterministic and len(q) > 1:
        table = _blocks(block_table, table_rows, 0, block_table.shape[1])
        for row in range(len(q)):
            one = slice(row, row + 1)
            decode_attention(
                q[one], k_cache, v_cache, table[one], seq_lens[one], scale, sliding_window, out[one],
                k_scale=k_scale, v_scale=v_scale, soft_cap=soft_cap, sinks=sinks,
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
    k = _gather(k_cache, k_scale, blocks, q.dtype)[:, : longest - first_key].transpose(1, 2)
    v = _gather(v_cache, v_scale, blocks, q.dtype)[:, : longest - first_key].transpose(1, 2)
    visible = mask = None
    if min(lengths) < longest or 0 < sliding_window < longest:
        keys = torch.arange(first_key, longest, device=q.device)
        visible = keys < seq_lens[:, None]
        if sliding_window:
            visible &= keys >= seq_lens[:, None] - sliding_window
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
        mask = mask[:, None, None, :]
    grouped = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scale *= _of_all(k_scale)
    if soft_cap or sinks is not None:
        of_one = None if visible is None else visible[:, None]
        attended = _attend(grouped[:, :, :, None], k, v, scale, of_one, soft_cap, sinks)
    else:
        attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    out.copy_(attended.reshape(out.shape))
    if _of_all(v_scale) != 1.0:
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
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    deterministic: bool = False,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Ragged query chunks, one sequence at a time: chunks are long, so that the loop costs little."""
    if out is None:
        out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device=q.device)
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
                k_scale=k_scale, v_scale=v_scale, deterministic=True, soft_cap=soft_cap, sinks=sinks,
            )  # fmt: skip
            continue
        first_visible = max(seq_len - query_len - sliding_window + 1, 0) if sliding_window else 0
        first_block = first_visible // block_size
        first_key = first_block * block_size
        blocks = block_table[row : row + 1, first_block : -(-seq_len // block_size)]
        k = _gather(k_cache, k_scale, blocks, q.dtype)[:, : seq_len - first_key].transpose(1, 2)
        v = _gather(v_cache, v_scale, blocks, q.dtype)[:, : seq_len - first_key].transpose(1, 2)
        windowed = 0 < sliding_window < seq_len
        is_whole_prompt = query_len == seq_len and not windowed
        is_direct = bool(soft_cap) or sinks is not None
        mask = None
        if is_direct or (not is_whole_prompt and (query_len > 1 or windowed)):
            mask = _chunk_mask(query_len, seq_len, sliding_window, first_key, q.device)
        if is_direct:
            assert mask is not None
            grouped = q[None, begin:end].unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)
            pieces = zip(grouped.split(QUERIES_AT_ONCE, 3), mask[None].split(QUERIES_AT_ONCE, 1), strict=True)
            attended = torch.cat(
                [_attend(some, k, v, scale * _of_all(k_scale), seen, soft_cap, sinks) for some, seen in pieces], 3
            ).flatten(1, 2)
        else:
            attended = F.scaled_dot_product_attention(
                q[None, begin:end].transpose(1, 2),
                k,
                v,
                attn_mask=mask,
                is_causal=is_whole_prompt and query_len > 1,
                scale=scale * _of_all(k_scale),
                enable_gqa=True,
            )
        out[begin:end] = attended[0].transpose(0, 1)
        if _of_all(v_scale) != 1.0:
            out[begin:end].mul_(v_scale)
    return out


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
    """One sequence at a time."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    borders: list[int] = starts.tolist()
    for begin, end in pairwise(borders):
        distances = torch.arange(end - begin, device=q.device)
        distances = distances[None, :] - distances[:, None]
        mask: Tensor | None = None
        if bias is not None:
            mask = bias[:, distances + bias.shape[1] // 2].to(q.dtype)
        if 0 < window < end - begin - 1:
            hidden = distances.abs() > window
            mask = torch.zeros(distances.shape, dtype=q.dtype, device=q.device) if mask is None else mask
            mask = mask.masked_fill(hidden, float("-inf"))
        queries, keys, values = (each[begin:end].transpose(0, 1)[None] for each in (q, k, v))
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out
