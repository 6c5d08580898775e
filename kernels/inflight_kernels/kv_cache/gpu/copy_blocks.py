"""Copies of whole KV-cache blocks, in every layer, keys and values: one launch for all caches of the same layout.

    cache[target[i]] = cache[source[i]]      for each i with source[i], target[i] >= 0 and each cache (a layer's k or
                                             v, or their scales)

Bytes: 2 pairs * caches * bytes of a block; no arithmetic. One block of 64 tokens, 8 heads of 128 in bf16 is 128 KiB;
in 32 layers, k and v, a pair moves 16.8 MB: 3.9 us at 4.3 TB/s; 64 pairs 1.07 GB, 250 us. Blocks are copied as int64
words, whatever their dtype, so the layout is only the length of a block and the distance to the next.

The layers' caches are separate allocations, so the kernel reads their addresses from a table on the device. The table
is created at the first call with a set of caches and kept: later calls upload nothing and do not wait.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import cdiv, check_shape, check_unit_stride
from inflight_kernels.tuning import tuned

WORD_BYTES = 8
# 16-byte loads and stores need addresses that are multiples of it.
ALIGNMENT = 16
# Words per program, and its warps.
CANDIDATES: tuple[Mapping[str, int], ...] = (
    {"BLOCK_WORDS": 512, "num_warps": 4},
    {"BLOCK_WORDS": 1024, "num_warps": 4},
    {"BLOCK_WORDS": 2048, "num_warps": 8},
    {"BLOCK_WORDS": 4096, "num_warps": 8},
)


def default_config() -> Mapping[str, int]:
    """Four 16-byte loads per thread before the first store; one pair of 16.8 MB is 1024 programs. Not measured yet."""
    return {"BLOCK_WORDS": 1024, "num_warps": 4}


# One compiled kernel for pointers of any alignment, since the pairs may be a slice of a longer list: triton would
# otherwise specialise for multiples of 16 bytes.
@triton.jit(do_not_specialize=["source_ptr", "target_ptr"])
def copy_blocks_kernel(
    caches_ptr, source_ptr, target_ptr, num_words, stride_block, num_chunks, BLOCK_WORDS: tl.constexpr
):
    pid_pair = tl.program_id(0) // num_chunks
    pid_chunk = tl.program_id(0) % num_chunks
    pid_cache = tl.program_id(1)
    source = tl.load(source_ptr + pid_pair).to(tl.int64)
    target = tl.load(target_ptr + pid_pair).to(tl.int64)
    # The compiler knows nothing about an address read from a table; the launcher has checked its alignment.
    cache_ptr = tl.multiple_of(tl.load(caches_ptr + pid_cache).to(tl.pointer_type(tl.int64)), 16)
    if (source >= 0) & (target >= 0) & (source != target):
        offs = pid_chunk * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
        mask = offs < num_words
        words = tl.load(cache_ptr + source * stride_block + offs, mask=mask)
        tl.store(cache_ptr + target * stride_block + offs, words, mask=mask)


@functools.lru_cache(maxsize=64)
def _address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _check(caches: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    for cache in caches:
        if cache.dim() < 2 or not cache[0].is_contiguous():
            raise ValueError(f"each cache must be (num_blocks, ...) with contiguous blocks, got {tuple(cache.shape)}")
        if len(cache) != len(caches[0]):
            raise ValueError("all caches must have the same number of blocks")
        if cache.data_ptr() % ALIGNMENT:
            raise ValueError(f"a cache must begin at a multiple of {ALIGNMENT} bytes")
        if cache[0].numel() * cache.itemsize % ALIGNMENT or cache.stride(0) * cache.itemsize % ALIGNMENT:
            raise ValueError(f"blocks must be multiples of {ALIGNMENT} bytes, got {cache[0].numel() * cache.itemsize}")
    check_shape("target", target, tuple(source.shape))
    for name, index in (("source", source), ("target", target)):
        if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be (pairs,) of int32 or int64, got {tuple(index.shape)} of {index.dtype}")
        if len(index) > 1:
            check_unit_stride(name, index)


def copy_blocks(
    caches: Sequence[Tensor], source: Tensor, target: Tensor, *, config: Mapping[str, int] | None = None
) -> None:
    """Launch the copies; see `inflight_kernels.copy_blocks`."""
    if not caches or not len(source):
        return
    _check(caches, source, target)
    device = caches[0].device
    layouts: dict[tuple[int, int], list[int]] = {}
    for cache in caches:
        num_words, stride_block = (size * cache.itemsize // WORD_BYTES for size in (cache[0].numel(), cache.stride(0)))
        layouts.setdefault((num_words, stride_block), []).append(cache.data_ptr())
    for (num_words, stride_block), addresses in layouts.items():
        chosen = config or tuned("copy_blocks", {"words": num_words}, default_config(), device)
        num_chunks = cdiv(num_words, chosen["BLOCK_WORDS"])
        copy_blocks_kernel[(len(source) * num_chunks, len(addresses))](
            _address_table(tuple(addresses), device),
            source,
            target,
            num_words,
            stride_block,
            num_chunks,
            BLOCK_WORDS=chosen["BLOCK_WORDS"],
            num_warps=chosen["num_warps"],
        )
