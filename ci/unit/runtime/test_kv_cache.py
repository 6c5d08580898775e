"""KVCache: a block is copied in every layer, also if the layers keep different numbers per token.

pytest ci/unit/runtime/test_kv_cache.py
"""

from __future__ import annotations

import torch

from inflight.layers.attention import CacheSpec
from inflight.runtime.kv_cache import KVCache, KVCacheShape

NUM_BLOCKS = 5


def test_blocks_are_copied_in_layers_of_different_shapes() -> None:
    specs = (
        CacheSpec(num_kv_heads=2, head_dim=8, dtype=torch.float32),
        CacheSpec(num_kv_heads=1, head_dim=8, dtype=torch.float32),
        CacheSpec(num_kv_heads=2, head_dim=16, dtype=torch.bfloat16),
    )
    cache = KVCache(KVCacheShape(layers=specs, block_size=4), NUM_BLOCKS, torch.device("cpu"))
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    for number, tensor in enumerate(tensors):
        values = torch.arange(tensor.numel(), dtype=torch.float32) % 251 + number
        tensor.copy_(values.view(tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    cache.copy_blocks(torch.tensor([0, 3, 0]), torch.tensor([2, 4, 1]))
    came_from = {2: 0, 4: 3, 1: 0}
    for tensor, old in zip(tensors, before, strict=True):
        for block in range(NUM_BLOCKS + 1):
            assert torch.equal(tensor[block], old[came_from.get(block, block)])
