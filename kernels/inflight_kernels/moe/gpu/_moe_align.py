"""Assigns the rows of a grouped matrix product to experts: (token, choice) pairs sorted by expert, divided into tiles.

    order   the pairs t * top_k + j sorted by expert, lower pairs first within an expert; without padding
    tiles   rows 0, 1, 2: expert, first index into `order`, index after the last; at most BLOCK_M indices, one expert

A pair whose expert is not 0 to E - 1 (-1: an expert of another rank, or a padded token) is in no tile. Only the device
knows the number of tiles, `num_tiles`. The host uses the upper bound `most_tiles` and never waits.

Up to CHUNK pairs are sorted by one program: counts by histogram, order by sorting expert * CHUNK + pair, tiles by
prefix sums. More pairs are divided into chunks: the first launch counts each chunk; the second, one program, computes
prefix sums over chunks and experts; then each chunk sorts its own pairs, and its i-th sorted pair is stored at (first
place of the chunk's pairs of that expert) + i - (the chunk's pairs of lower experts), where the second launch has
replaced the counts by the terms that do not depend on i. No atomics on memory. Bytes: 4 P for the experts, 4 P for the
order, three times 4 E P / CHUNK: 3.4 MB at P = 262 144 pairs, 0.8 us at 4.3 TB/s; the launches and the one program of
prefix sums cost more than that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import cdiv, next_power_of_2

# Pairs that one program sorts: 64 tokens of 8 choices, a decode batch, in one launch. Not measured yet.
CHUNK = 512
# Counts that one step of the prefix sums holds: 32 per thread. Not measured yet.
SCAN_ELEMENTS = 8192


class Alignment(NamedTuple):
    """The sorted pairs: `order` (P,), `tiles` (3, most_tiles), `num_tiles` (1,), all int32."""

    order: Tensor
    tiles: Tensor
    num_tiles: Tensor


@triton.jit
def _count(experts, num_experts, BLOCK_E: tl.constexpr):
    """How many of a chunk's pairs chose each expert, (BLOCK_E,)."""
    valid = (experts >= 0) & (experts < num_experts)
    counts = tl.histogram(tl.where(valid, experts, 0), BLOCK_E)
    # Invalid choices were counted as expert 0.
    invalid = tl.sum(tl.where(valid, 0, 1), axis=0)
    return counts - tl.where(tl.arange(0, BLOCK_E) == 0, invalid, 0)


@triton.jit
def _sort(experts, num_experts, CHUNK: tl.constexpr):
    """A chunk's experts in ascending order, invalid ones last as `num_experts`, and the index that each came from."""
    valid = (experts >= 0) & (experts < num_experts)
    keys = tl.where(valid, experts, num_experts) * CHUNK + tl.arange(0, CHUNK)
    keys = tl.sort(keys)
    return keys // CHUNK, keys % CHUNK


@triton.jit
def _store_tiles(
    counts, tiles_ptr, num_tiles_ptr, most_tiles, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Divide each expert's range of places into tiles."""
    offs_e = tl.arange(0, BLOCK_E)
    ends = tl.cumsum(counts, axis=0)
    begins = ends - counts
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.cumsum(tiles, axis=0) - tiles
    tl.store(num_tiles_ptr, tl.sum(tiles, axis=0))
    for i in tl.range(0, tl.max(tiles, axis=0)):
        mask = i < tiles
        tile_ptrs = tiles_ptr + first + i
        tl.store(tile_ptrs, offs_e, mask=mask)
        tl.store(tile_ptrs + most_tiles, begins + i * BLOCK_M, mask=mask)
        tl.store(tile_ptrs + 2 * most_tiles, tl.minimum(begins + (i + 1) * BLOCK_M, ends), mask=mask)


# One compiled kernel for every number of pairs: triton would otherwise specialise for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def align_kernel(
    experts_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_pairs,
    num_experts,
    most_tiles,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    offs = tl.arange(0, CHUNK)
    experts = tl.load(experts_ptr + offs, mask=offs < num_pairs, other=-1)
    sorted_experts, pairs = _sort(experts, num_experts, CHUNK)
    tl.store(order_ptr + offs, pairs, mask=sorted_experts < num_experts)
    _store_tiles(_count(experts, num_experts, BLOCK_E), tiles_ptr, num_tiles_ptr, most_tiles, BLOCK_M, BLOCK_E)


@triton.jit(do_not_specialize=["num_pairs"])
def count_chunk_kernel(
    experts_ptr, counts_ptr, num_pairs, num_experts, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    pid_c = tl.program_id(0)
    offs = pid_c * CHUNK + tl.arange(0, CHUNK)
    experts = tl.load(experts_ptr + offs, mask=offs < num_pairs, other=-1)
    tl.store(counts_ptr + pid_c * BLOCK_E + tl.arange(0, BLOCK_E), _count(experts, num_experts, BLOCK_E))


@triton.jit(do_not_specialize=["num_chunks", "most_tiles"])
def scan_chunks_kernel(
    counts_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_chunks,
    most_tiles,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    offs_c = tl.arange(0, BLOCK_C)
    offs = offs_c[:, None] * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    totals = tl.zeros([BLOCK_E], dtype=tl.int32)
    for start in tl.range(0, num_chunks, BLOCK_C):
        mask = (start + offs_c < num_chunks)[:, None]
        totals += tl.sum(tl.load(counts_ptr + start * BLOCK_E + offs, mask=mask, other=0), axis=0)
    _store_tiles(totals, tiles_ptr, num_tiles_ptr, most_tiles, BLOCK_M, BLOCK_E)
    # First place of the next chunk's pairs of each expert.
    places = tl.cumsum(totals, axis=0) - totals
    for start in tl.range(0, num_chunks, BLOCK_C):
        mask = (start + offs_c < num_chunks)[:, None]
        counts = tl.load(counts_ptr + start * BLOCK_E + offs, mask=mask, other=0)
        before = tl.cumsum(counts, axis=0) - counts
        lower = tl.cumsum(counts, axis=1) - counts
        tl.store(counts_ptr + start * BLOCK_E + offs, places[None, :] + before - lower, mask=mask)
        places += tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["num_pairs"])
def place_chunk_kernel(
    experts_ptr, places_ptr, order_ptr, num_pairs, num_experts, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    pid_c = tl.program_id(0)
    offs = tl.arange(0, CHUNK)
    experts = tl.load(experts_ptr + pid_c * CHUNK + offs, mask=pid_c * CHUNK + offs < num_pairs, other=-1)
    sorted_experts, pairs = _sort(experts, num_experts, CHUNK)
    mask = sorted_experts < num_experts
    places = tl.load(places_ptr + pid_c * BLOCK_E + sorted_experts, mask=mask, other=0) + offs
    tl.store(order_ptr + places, pid_c * CHUNK + pairs, mask=mask)


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Largest number of tiles for `num_pairs` pairs: the last tile of every expert may hold a single row."""
    return (num_pairs + min(num_experts, num_pairs) * (block_m - 1)) // block_m


def align(experts: Tensor, num_experts: int, block_m: int, chunk: int = CHUNK) -> Alignment:
    """Launch the sort of `experts`, contiguous int32, into tiles of at most `block_m` places."""
    num_pairs = experts.numel()
    bound = most_tiles(num_pairs, num_experts, block_m)
    block_e = next_power_of_2(num_experts)
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.empty((3, bound), dtype=torch.int32, device=experts.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=experts.device)
    if num_pairs <= chunk:
        block = max(next_power_of_2(num_pairs), 16)
        align_kernel[(1,)](
            experts, order, tiles, num_tiles, num_pairs, num_experts, bound,
            CHUNK=block, BLOCK_M=block_m, BLOCK_E=block_e, num_warps=4,
        )  # fmt: skip
        return Alignment(order, tiles, num_tiles)
    num_chunks = cdiv(num_pairs, chunk)
    counts = torch.empty((num_chunks, block_e), dtype=torch.int32, device=experts.device)
    count_chunk_kernel[(num_chunks,)](
        experts, counts, num_pairs, num_experts, CHUNK=chunk, BLOCK_E=block_e, num_warps=4
    )
    block_c = min(max(SCAN_ELEMENTS // block_e, 1), next_power_of_2(num_chunks))
    scan_chunks_kernel[(1,)](
        counts, tiles, num_tiles, num_chunks, bound, BLOCK_C=block_c, BLOCK_M=block_m, BLOCK_E=block_e, num_warps=8
    )
    place_chunk_kernel[(num_chunks,)](
        experts, counts, order, num_pairs, num_experts, CHUNK=chunk, BLOCK_E=block_e, num_warps=4
    )
    return Alignment(order, tiles, num_tiles)
