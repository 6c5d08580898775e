"""StateStore: a block is copied in every layer, also if layers keep different numbers per token; what is not finite is
removed, and fp8 takes a byte.

pytest ci/unit/runtime/test_state_store.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inflight.layers.attention import KeyValueSpec
from inflight.runtime.state_store import StateShape, StateStore

NUM_BLOCKS = 5


def test_blocks_are_copied_in_layers_of_different_shapes() -> None:
    specs = (
        KeyValueSpec(num_kv_heads=2, head_dim=8, dtype=torch.float32).state_spec,
        KeyValueSpec(num_kv_heads=1, head_dim=8, dtype=torch.float32).state_spec,
        KeyValueSpec(num_kv_heads=2, head_dim=16, dtype=torch.bfloat16).state_spec,
        KeyValueSpec(num_kv_heads=2, head_dim=16, dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=0.25).state_spec,
    )
    cache = StateStore(StateShape(specs=specs, block_size=4), NUM_BLOCKS, torch.device("cpu"))
    tensors = [tensor for layer in cache.states for tensor in (layer["keys"], layer["values"])]
    for number, tensor in enumerate(tensors):
        values = torch.arange(tensor.numel(), dtype=torch.float32) % 251 + number
        tensor.copy_(values.view(tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    cache.copy_blocks(torch.tensor([0, 3, 0]), torch.tensor([2, 4, 1]))
    came_from = {2: 0, 4: 3, 1: 0}
    for tensor, old in zip(tensors, before, strict=True):
        for block in range(NUM_BLOCKS + 1):
            assert torch.equal(tensor[block], old[came_from.get(block, block)])


def test_fp8_takes_a_byte_and_the_cache_knows_its_scales() -> None:
    spec = KeyValueSpec(num_kv_heads=2, head_dim=16, dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=0.25)
    wide, shape = (
        StateShape(specs=(replace(spec, dtype=dtype).state_spec,), block_size=4)
        for dtype in (torch.bfloat16, spec.dtype)
    )
    assert 2 * shape.block_bytes == wide.block_bytes == 2 * 4 * 2 * 16 * 2
    [layer] = StateStore(shape, NUM_BLOCKS, torch.device("cpu")).states
    assert layer["keys"].nbytes + layer["values"].nbytes == (NUM_BLOCKS + 1) * shape.block_bytes
    assert shape.specs[0].scales == (0.5, 0.25)


def test_int8_takes_a_byte_and_a_float_for_each_head_of_a_token() -> None:
    spec = KeyValueSpec(num_kv_heads=2, head_dim=16, dtype=torch.int8).state_spec
    shape = StateShape(specs=(spec,), block_size=4)
    assert shape.block_bytes == 2 * 4 * 2 * (16 + 4)
    cache = StateStore(shape, NUM_BLOCKS, torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in cache.block_tensors) == (NUM_BLOCKS + 1) * shape.block_bytes
    for tensor in cache.block_tensors:
        tensor.fill_(7)
    [layer] = cache.states
    scales = layer["v_scales"]
    scales[1, 2, 0] = torch.nan
    cache.scrub([1])
    assert scales[1, 2, 0] == 0.0 and (scales == 7.0).sum() == scales.numel() - 1
    assert all((tensor == 7).all() for tensor in cache.block_tensors if tensor is not scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_what_is_not_finite_is_removed_and_all_else_stays(dtype: torch.dtype) -> None:
    """Of every number that fp8 has, both NaNs among them, and infinity, which the other types have."""
    numbers = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    numbers[:2] = torch.tensor([torch.inf, -torch.inf])
    spec = KeyValueSpec(num_kv_heads=4, head_dim=64, dtype=dtype).state_spec
    cache = StateStore(StateShape(specs=(spec,), block_size=4), 2, torch.device("cpu"))
    tensors = [cache.states[0]["keys"], cache.states[0]["values"]]
    for tensor in tensors:
        tensor.copy_(numbers.repeat(tensor.numel() // 256).view(tensor.shape))
    before = [tensor.float() for tensor in tensors]
    assert all(not old.isfinite().all() for old in before)
    cache.scrub([1])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[1].float(), torch.where(old[1].isfinite(), old[1], 0.0))
        assert torch.equal(tensor[0].float().isfinite(), old[0].isfinite())


def test_a_shared_state_is_the_same_memory_and_counts_once() -> None:
    specs = tuple(
        KeyValueSpec(num_kv_heads=1, head_dim=size, dtype=torch.float32, shared_back=back).state_spec
        for size, back in ((8, 0), (16, 0), (8, 2), (16, 2))
    )
    shared, own = (StateShape(specs=each, block_size=4) for each in (specs, specs[:2]))
    assert shared.block_bytes == own.block_bytes
    store = StateStore(shared, 3, torch.device("cpu"))
    first, second, *others = store.states
    assert [each is state for each, state in zip(others, (first, second), strict=True)] == [True, True]
    assert len(store.block_tensors) == 4
