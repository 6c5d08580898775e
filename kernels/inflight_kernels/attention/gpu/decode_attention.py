"""Attention of one new token per sequence over a paged KV cache, with the keys distributed over the whole device.

    p_j = softmax_j(scale * k_scale * q . k_j),   o = v_scale * sum_j p_j v_j,
    over the visible keys j < seq_len (and > seq_len - 1 - w with a window w); with a soft cap c the softmax is of
    c tanh(scale * k_scale * q . k_j / c), and with sinks it has one more term of each head, without a value

The G = Hq / Hkv query heads that share a KV head are the rows of one tile (at least 16, the minimum of tl.dot), so each
key and value is read once. Tiles of BLOCK_N keys are distributed in one of two ways. The choice depends on shapes only,
so that a CUDA graph captured for a batch size can be replayed for any lengths, and lengths are never read by the host:

- persistent, for two or more rows: `programs_per_sm` programs per multiprocessor, each with an equal share of all tiles
  (`decode_persistent_kernel`). Rows of 128 and of 8k keys are balanced to within one tile, and no batch size leaves the
  last wave half empty: 60 rows of 8 heads on a fixed grid would be 480 programs, two waves of 396 for the work of 1.2.
- split, for one row (nothing to balance, and the prefix sum over lengths would only add latency) and for more than
  MAX_PERSISTENT_ROWS (so many programs balance by themselves): grid (Hkv, splits, B).

The last program of each pair merges its parts. Deterministic: prefill attention computes the rows, as chunks of one
token each, so that a token has the same bits in a decode and in a prompt; few rows of long sequences then leave most of
the device idle.

Bytes: 2 Hkv D sum(seq_lens) e for a cache of element size e, and q and out: 537 MB for 32 rows of 4096 keys, 8 KV
heads of 128, bf16; 269 MB in fp8. Operations: 4 Hq D sum(seq_lens), that is G per byte in bf16 and 2 G in fp8, 4 and 8
with G = 4, where an H200 could do 180. Memory bandwidth is the lower bound: at 4.3 TB/s 125 us (fp8: 62 us) for that
batch, 2.2 GB and 507 us for 128 rows of 128 to 8k keys (4160 on average), and 31 us for one row of 32k keys. One row of
1k keys is 4 MB, 1 us: there the launch and its latency dominate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from inflight_kernels.attention.gpu._attention import (
    KeyHeads,
    check_attention,
    check_scales,
    launch_options,
    score_scales,
    slot_scales,
)
from inflight_kernels.attention.gpu._decode_kernels import decode_persistent_kernel, decode_split_kernel
from inflight_kernels.attention.gpu.prefill_attention import prefill_attention
from inflight_kernels.common.checks import (
    cdiv,
    check_vector,
    multiprocessor_count,
    next_power_of_2,
    shared_memory_per_sm,
)
from inflight_kernels.common.last_program import counters
from inflight_kernels.tuning import tuned

# The prefix sum over lengths holds 8 lengths per thread at 1024 rows; with more rows the grid has more than 1024
# programs per KV head, and the hardware balances them.
MAX_PERSISTENT_ROWS = 1024
# Minimum width of that prefix sum: one length per lane of one warp. From 128 lengths on it spans several warps and
# takes up to 70 registers more.
LEAST_BLOCK_B = 32
# Floats that are merged at a time, 32 per thread: with 4 query heads of 128 those of 8 parts. With 64 the merge takes
# more registers than the attention: two programs fit on a multiprocessor instead of three (ptxas, triton 3.7, sm_90).
MERGED_FLOATS = 4096

# What the tuning script tries. num_stages - 1 tiles of K and V have a buffer; one tile is multiplied while the others
# are loaded. 4.3 TB/s at about 1 us of latency need 33 KB in flight per multiprocessor; a tile of 64 keys of 128 is
# 32 KB in bf16, 16 KB in fp8.
CANDIDATES: tuple[Mapping[str, int], ...] = (
    {"persistent": 1, "programs_per_sm": 3, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 160},
    {"persistent": 1, "programs_per_sm": 2, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 255},
    {"persistent": 1, "programs_per_sm": 1, "BLOCK_N": 64, "num_warps": 8, "num_stages": 4, "maxnreg": 0},
    {"persistent": 1, "programs_per_sm": 4, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 0},
    {"persistent": 0, "programs_per_sm": 3, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 0},
    {"persistent": 0, "programs_per_sm": 4, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 0},
    {"persistent": 0, "programs_per_sm": 4, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 0},
)
MAX_PROGRAMS_PER_SM = 4
# Buffers of a program's tiles, and all of its shared memory: queries and probabilities take at most 11 KB, the driver
# 1 KB. Three programs fit into the 228 KB of Hopper and Blackwell, two into the 164 KB of sm_80.
BUFFER_BYTES = 64 * 1024
PROGRAM_BYTES = 76 * 1024


class _Schedule(NamedTuple):
    """How the tiles are distributed. `programs` applies if `persistent`, `splits` if not."""

    persistent: bool
    programs: int
    splits: int

    def slots(self, pairs: int) -> int:
        """Number of parts for which the scratch buffer needs space."""
        if self.persistent:
            return 2 * self.programs
        return pairs * self.splits if self.splits > 1 else 0


def default_config(
    batch: int,
    group: int,
    head_dim: int,
    block_size: int,
    element_size: int,
    device: torch.device,
    *,
    has_slot_scales: bool = False,
) -> dict[str, int]:
    """Reasoned, not measured yet: see the module and `CANDIDATES`. `group`: query heads that share a KV head.
    `element_size`: of the cache, in bytes."""
    if head_dim > 256:
        return latent_config(batch, element_size, has_slot_scales=has_slot_scales)
    block_d = max(next_power_of_2(head_dim), 16)
    # With more than 16 rows a tile two programs fit, not three: 64 rows take up to 255 registers a thread.
    few_rows = group <= 16
    # 64 keys of 256 spill 40 bytes on sm_90 (ptxas, triton 3.8), 64 of 128 in float32 48 bytes on sm_80 (3.7). A tile
    # of several blocks has an entry of the table for each of its keys: 64 of them spill 140 bytes on sm_90.
    block_n = 64 if few_rows and block_d * max(element_size, 2) <= 256 and block_size % 64 == 0 else 32
    # fp8 values go through one more buffer, in float16.
    converted_bytes = 2 * block_n * block_d if element_size == 1 else 0
    buffers = max((BUFFER_BYTES - converted_bytes) // (2 * block_n * block_d * element_size), 1)
    # With the scales of slots three programs spill 8 bytes on sm_100 (ptxas, triton 3.7).
    most_programs = 3 if few_rows and not has_slot_scales else 2
    programs_per_sm = min(max(shared_memory_per_sm(device) // PROGRAM_BYTES, 1), most_programs)
    # Three programs of 4 warps may have 168 registers a thread each. Left to itself ptxas aims at 128 for some shapes
    # and spills 8 to 32 bytes; so it does with 168 and 16 bits (triton 3.7).
    is_limited = programs_per_sm == 3 and element_size < 4 and head_dim <= 128
    limit = 168 if element_size == 1 else 160
    return {
        "persistent": int(1 < batch <= MAX_PERSISTENT_ROWS),
        "programs_per_sm": programs_per_sm,
        "BLOCK_N": block_n,
        "num_warps": 4,
        # Two buffers of float32 spill 8 bytes on sm_80 (ptxas, triton 3.7).
        "num_stages": 1 + (min(buffers, 4 if few_rows else 2) if element_size < 4 else 1),
        "maxnreg": limit if is_limited else 0,
    }


def latent_config(batch: int, element_size: int, *, has_slot_scales: bool = False) -> dict[str, int]:
    """The same for latents, and for heads of 512, whose tiles are as wide as four heads. Not measured yet.
    `element_size`: of q, or of the cache. With the scales of slots 32 keys spill up to 32 bytes (ptxas, triton 3.7)."""
    return {
        "persistent": int(1 < batch <= MAX_PERSISTENT_ROWS),
        "programs_per_sm": 1,
        "BLOCK_N": 16 if element_size == 4 or has_slot_scales else 32,
        "num_warps": 8,
        "num_stages": 2,
        "maxnreg": 0,
    }


def decode_scratch_elements(num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> int:
    """Upper bound of the float32 elements of scratch that a call needs, for any tuned configuration. A caller can
    allocate them once and pass them to every call.
    """
    programs = MAX_PROGRAMS_PER_SM * multiprocessor_count(device)
    return 2 * programs * (num_q_heads // num_kv_heads) * (head_dim + 2)


def _schedule(config: Mapping[str, int], batch: int, pairs: int, max_keys: int, programs: int) -> _Schedule:
    """The distribution of tiles, which depends on shapes only and never on the sequence lengths."""
    if config["persistent"] and batch <= MAX_PERSISTENT_ROWS:
        return _Schedule(persistent=True, programs=programs, splits=0)
    max_tiles = cdiv(max_keys, config["BLOCK_N"])
    return _Schedule(persistent=False, programs=0, splits=max(min(programs // pairs, max_tiles), 1))


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
    config: Mapping[str, int] | None = None,
    num_programs: int | None = None,
) -> Tensor:
    """Launch decode attention; see `inflight_kernels.decode_attention`.

    `config` overrides the tuned one; `num_programs` overrides `programs_per_sm` times the multiprocessor count.
    """
    if deterministic:
        return prefill_attention(
            q, k_cache, v_cache, block_table, None, seq_lens, 1, scale, sliding_window, out,
            table_rows=table_rows, k_scale=k_scale, v_scale=v_scale, deterministic=True, soft_cap=soft_cap, sinks=sinks,
            config=config,
        )  # fmt: skip
    check_attention(q, k_cache, v_cache, (k_scale, v_scale), block_table, table_rows, q.shape[0], out, sinks)
    check_vector("seq_lens", seq_lens, q.shape[0], torch.int32)
    check_scales(scale, k_scale, v_scale, sliding_window, soft_cap)
    batch, num_q_heads, head_dim = q.shape
    block_size, value_dim = k_cache.shape[1], v_cache.shape[3]
    if out is None:
        out = torch.empty((batch, num_q_heads, value_dim), dtype=q.dtype, device=q.device)
    if batch == 0:
        return out
    heads = KeyHeads.of(q, k_cache, v_cache)
    group, pairs = heads.group, batch * heads.count
    max_keys = block_table.shape[1] * block_size
    if config is None:
        shape: dict[str, int | str] = {
            "head_dim": heads.size(head_dim, value_dim),
            "group": group,
            "block_size": str(block_size),
            "cache": str(k_cache.dtype),
            "window": str(sliding_window > 0),
            "pairs": next_power_of_2(pairs),
            "max_keys": next_power_of_2(max_keys),
        }
        if heads.is_latent:
            default = latent_config(batch, q.element_size(), has_slot_scales=isinstance(k_scale, Tensor))
        else:
            default = default_config(
                batch,
                group,
                head_dim,
                block_size,
                k_cache.element_size(),
                q.device,
                has_slot_scales=isinstance(k_scale, Tensor),
            )
        config = tuned("decode_attention", shape, default, q.device)
    programs = num_programs or config["programs_per_sm"] * multiprocessor_count(q.device)
    schedule = _schedule(config, batch, pairs, max_keys, programs)

    rows = schedule.slots(pairs) * group
    elements = rows * (value_dim + 2)
    if scratch is None:
        scratch = torch.empty(elements, dtype=torch.float32, device=q.device)
    elif scratch.dtype != torch.float32 or scratch.numel() < elements or not scratch.is_contiguous():
        raise ValueError(f"scratch must be contiguous float32 of at least {elements} elements, got {scratch.numel()}")
    acc, m, sums = scratch.view(-1)[:elements].split([rows * value_dim, rows, rows])
    # A pair of a fixed grid is shared only if there are more programs than pairs.
    arrived = counters(programs, q.device)

    block_g, tiles = next_power_of_2(group), heads.tiles(head_dim, value_dim)
    k_scale, v_scale, k_scales, v_scales = slot_scales(k_scale, v_scale)
    operands = (q, k_cache, v_cache, k_scales, v_scales, block_table, table_rows, seq_lens, out, acc, m, sums, arrived)
    strides = (
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        heads.stride,
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
    )
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": block_size,
        "SLIDING_WINDOW": sliding_window,
        # Exact products keep float32 comparable to the reference; for float16 and bfloat16 this has no effect.
        "INPUT_PRECISION": "ieee",
        "BLOCK_M": max(16, block_g),
        "BLOCK_N": config["BLOCK_N"],
        "BLOCK_S": max(MERGED_FLOATS // (block_g * tiles["BLOCK_D"]), 1),
        "BLOCK_G": block_g,
        **tiles,
        **launch_options(config),
    }
    scales = (*score_scales(scale, k_scale, soft_cap), v_scale)
    if schedule.persistent:
        decode_persistent_kernel[(schedule.programs,)](
            *operands,
            sinks,
            *scales,
            batch,
            *strides,
            NUM_KV_HEADS=heads.count,
            # Fewer lengths than a warp has lanes would cost the same, and each size needs a compiled kernel.
            BLOCK_B=max(next_power_of_2(batch), LEAST_BLOCK_B),
            **constants,
        )
    else:
        decode_split_kernel[(heads.count, schedule.splits, batch)](*operands, sinks, *scales, *strides, **constants)
    return out
