"""Block copies: kernel against reference, reference block by block, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import inflight_kernels
from inflight_kernels.kv_cache import gpu, reference

NUM_BLOCKS = 7
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def _bits(cache: Tensor) -> Tensor:
    return cache.cpu().view(torch.uint8)


def _caches(count: int, dtype: torch.dtype) -> list[Tensor]:
    """Every block differs, and one holds NaN, which must be copied as it is."""
    caches = torch.randn(count, NUM_BLOCKS, 4, 3, 16).to(dtype)
    caches[0, 2, 1] = float("nan")
    return list(caches)


def _pairs(index_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A fork in two, a copy, padding on either side, and a block onto itself."""
    source = torch.tensor([0, -1, 2, 0, 3, 6], dtype=index_dtype)
    target = torch.tensor([5, 1, 4, 1, -1, 6], dtype=index_dtype)
    return source, target


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_kernel_equals_reference(index_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    caches = _caches(6, dtype)
    on_device = [cache.clone().to(device) for cache in caches]
    source, target = _pairs(index_dtype)
    reference.copy_blocks(caches, source, target)
    # Fewer words than a block has: several programs a block.
    config = {"BLOCK_WORDS": 32, "num_warps": 1}
    gpu.copy_blocks(on_device, source.to(device), target.to(device), config=config)
    for got, wanted in zip(on_device, caches, strict=True):
        assert torch.equal(_bits(got), _bits(wanted))


def test_caches_of_different_shapes_and_types(device: torch.device) -> None:
    """Other numbers of heads, another head size, another element size, and scales, which have one dimension less."""
    kinds = [
        ((4, 3, 16), torch.float32),
        ((4, 1, 16), torch.float32),
        ((4, 3, 32), torch.float16),
        ((4, 3, 16), torch.float16),
        ((4, 3), torch.float32),
    ]
    caches = [torch.randn(NUM_BLOCKS, *shape).to(dtype) for shape, dtype in kinds]
    before, on_device = [cache.clone() for cache in caches], [cache.clone().to(device) for cache in caches]
    source, target = _pairs(torch.int64)
    reference.copy_blocks(caches, source, target)
    gpu.copy_blocks(on_device, source.to(device), target.to(device), config={"BLOCK_WORDS": 32, "num_warps": 1})
    came_from = {5: 0, 4: 2, 1: 0}
    for wanted, old, got in zip(caches, before, on_device, strict=True):
        for block in range(NUM_BLOCKS):
            assert torch.equal(wanted[block], old[came_from.get(block, block)])
        assert torch.equal(_bits(got), _bits(wanted))


def test_reference_copies_each_block_and_nothing_else() -> None:
    [cache] = _caches(1, torch.float32)
    before = cache.clone()
    reference.copy_blocks([cache], *_pairs(torch.int64))
    came_from = {5: 0, 4: 2, 1: 0}
    for block in range(NUM_BLOCKS):
        assert torch.equal(_bits(cache[block]), _bits(before[came_from.get(block, block)]))


def test_copies_that_depend_on_their_order_are_refused_where_they_can_be_seen() -> None:
    caches = _caches(1, torch.float32)
    with pytest.raises(ValueError, match="target of two copies"):
        inflight_kernels.copy_blocks(caches, torch.tensor([0, 1]), torch.tensor([2, 2]))
    with pytest.raises(ValueError, match=r"blocks \[1\] are both"):
        inflight_kernels.copy_blocks(caches, torch.tensor([0, 1]), torch.tensor([1, 2]))
    inflight_kernels.copy_blocks(caches, *_pairs(torch.int32))


def test_launcher_refuses_with_words() -> None:
    k_cache, v_cache = _caches(2, torch.float32)
    source, target = _pairs(torch.int32)
    with pytest.raises(ValueError, match="the same number of blocks"):
        gpu.copy_blocks([k_cache, v_cache[:-1]], source, target)
    with pytest.raises(ValueError, match="source must be"):
        gpu.copy_blocks([k_cache, v_cache], source.float(), target)
    with pytest.raises(ValueError, match="contiguous blocks"):
        gpu.copy_blocks([k_cache[..., :8], v_cache[..., :8]], source, target)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        gpu.copy_blocks([torch.zeros(2, 1, 1, 2)], source, target)
