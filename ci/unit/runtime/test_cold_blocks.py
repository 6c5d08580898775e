"""Parts of cached blocks and blocks from host memory on a real network: the tokens are those of a request alone.

Run: pytest ci/unit/runtime/test_cold_blocks.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled_network import needs_compiler
from network_engine import BLOCK_SIZE, Engine
from tiny_checkpoints import make_checkpoint, make_prompt

from inflight.config import EngineConfig, SchedulerPolicy
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.errors import ConfigurationError
from inflight.layers.attention import KeyValueSpec
from inflight.layers.state import StateSpec, TensorSpec, Unit
from inflight.output_config import OutputConfig
from inflight.request import Request
from inflight.runtime import host_units
from inflight.runtime.host_units import HostUnits, count_host_units
from inflight.runtime.state_store import StateShape, StateStore, Units
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import SchedulerOutput

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
HOST_BYTES = 1 << 20
STEM = make_prompt(30, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3").folder


def request(number: int, prompt: list[int], max_tokens: int = 6) -> Request:
    sampling = SamplingConfig(temperature=0.9, seed=number) if number % 2 else SamplingConfig()
    return Request(
        request_id=number,
        input_token_ids=prompt,
        max_tokens=max_tokens,
        sampling_config=sampling,
        output_config=OutputConfig(return_log_probs=True),
    )


def requests() -> list[Request]:
    """Prompts that part from each other at every place of a block, among others that need the memory."""
    parting = [[*STEM[: 8 + number], *make_prompt(3, seed=50 + number)] for number in range(9)]
    others = [make_prompt(34, seed=100 + number) for number in range(5)]
    return [
        request(number, prompt) for number, prompt in enumerate([STEM, *parting[:5], *others, *parting[5:], STEM], 1)
    ]


def small_engine(folder: Path, *, partial: bool, host_bytes: int, **options: Any) -> Engine:
    return Engine(
        folder,
        policy=SchedulerPolicy.MAX_UTILIZATION,
        num_blocks=20,
        max_num_tokens=24,
        kv_cache={"enable_partial_reuse": partial},
        enable_partial_reuse=partial,
        kv_cache_host_memory_bytes=host_bytes,
        **options,
    )


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, tuple[list[int], list[float]]]:
    """By request, tokens and log probabilities without any reuse."""
    engine = Engine(
        folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=64, max_num_tokens=64, enable_reuse=False
    )
    for each in requests():
        engine.serve([each])
    return {each.request_id: (engine.tokens(each.request_id), engine.log_probs(each.request_id)) for each in requests()}


@pytest.mark.parametrize(("partial", "host_bytes"), [(True, 0), (False, HOST_BYTES), (True, HOST_BYTES)])
@pytest.mark.parametrize("together", [True, False])
def test_tokens_do_not_depend_on_what_was_reused(
    folder: Path, alone: dict[int, tuple[list[int], list[float]]], partial: bool, host_bytes: int, together: bool
) -> None:
    engine = small_engine(folder, partial=partial, host_bytes=host_bytes)
    for batch in [requests()] if together else [[each] for each in requests()]:
        engine.serve(batch)
    assert (engine.kv_cache.num_partially_reused_blocks > 0) is partial
    assert (engine.kv_cache.num_onboarded_blocks > 0) is (host_bytes > 0)
    for request_id, (tokens, log_probs) in alone.items():
        assert engine.tokens(request_id) == tokens
        np.testing.assert_allclose(engine.log_probs(request_id), log_probs, atol=1e-5)
    engine.runner.close()


@pytest.mark.parametrize(
    ("name", "cpu_compile"), [("qwen3", "false"), pytest.param("mistral-wide", "true", marks=needs_compiler)]
)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_with_8_bits_no_bit_depends_on_it(kv_cache_dtype: str, name: str, cpu_compile: str, tmp_path: Path) -> None:
    """In C++, and in torch with `deterministic`. Chunks, parts of cached blocks and blocks from host memory: the next
    tokens find the same rounded keys."""
    folder = make_checkpoint(tmp_path, name).folder
    rounded = {"kv_cache_dtype": kv_cache_dtype, "deterministic": True, "cpu_compile": cpu_compile}
    plain = Engine(folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=64, max_num_tokens=64,
                   enable_reuse=False, **rounded)  # fmt: skip
    for each in requests():
        plain.serve([each])
    engine = small_engine(folder, partial=True, host_bytes=HOST_BYTES, **rounded)
    engine.serve(requests())
    assert engine.kv_cache.num_partially_reused_blocks > 0 and engine.kv_cache.num_onboarded_blocks > 0
    for each in requests():
        assert engine.tokens(each.request_id) == plain.tokens(each.request_id)
        assert engine.log_probs(each.request_id) == plain.log_probs(each.request_id)


def test_nan_behind_the_common_tokens_is_not_copied(folder: Path) -> None:
    """Attention may multiply what lies behind a sequence's last token by 0, and 0 times NaN is NaN."""
    engine = small_engine(folder, partial=True, host_bytes=0)
    engine.serve([request(2, STEM, 2)])
    caches = [cache for layer in engine.runner._store.states for cache in (layer["keys"], layer["values"])]
    for cache in caches:
        cache[0, 2:] = torch.nan
    prompt = [*STEM[:2], 7]
    engine.serve([request(4, prompt, 1)])
    assert engine.kv_cache.num_partially_reused_blocks == 1
    assert all(cache[0, 2:].isnan().all() and cache[1:].isfinite().all() for cache in caches)
    fresh = small_engine(folder, partial=False, host_bytes=0)
    fresh.serve([request(4, prompt, 1)])
    assert engine.tokens(4) == fresh.tokens(4)


def test_a_runner_without_host_memory_refuses_steps_that_need_it(folder: Path) -> None:
    engine = small_engine(folder, partial=False, host_bytes=0)
    for copies in ({"offloads": [(0, 0)]}, {"onboards": [(0, 0)]}):
        with pytest.raises(ValueError, match="blocks in host memory are not served"):
            engine.runner.forward(SchedulerOutput(new_sequences=[], rows=[], **copies))


# -- the memory --------------------------------------------------------------------------------------------------------

SPECS = (
    KeyValueSpec(num_kv_heads=2, head_dim=8, dtype=torch.float32).state_spec,
    KeyValueSpec(num_kv_heads=1, head_dim=24, dtype=torch.bfloat16).state_spec,
    KeyValueSpec(num_kv_heads=2, head_dim=16, dtype=torch.float8_e4m3fn).state_spec,
)
SHAPE = StateShape(specs=SPECS, block_size=BLOCK_SIZE)


def fill(kv_cache: StateStore) -> None:
    for layer in kv_cache.states:
        for cache in (layer["keys"], layer["values"]):
            cache.copy_(torch.randn(cache.shape))


def block_bytes(kv_cache: StateStore, block_id: int) -> list[bytes]:
    caches = [cache for layer in kv_cache.states for cache in (layer["keys"], layer["values"])]
    return [cache[block_id].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for cache in caches]


def test_a_round_trip_changes_no_bit() -> None:
    kv_cache = StateStore(SHAPE, 6, CPU)
    host = HostUnits(kv_cache.block_tensors, 4, CPU)
    fill(kv_cache)
    before = [block_bytes(kv_cache, block_id) for block_id in range(6)]
    host.offload([(5, 0), (2, 3), (0, 1)])
    fill(kv_cache)
    untouched = block_bytes(kv_cache, 4)
    host.onboard([(3, 0), (0, 2), (1, 1), (0, 3)])
    assert [block_bytes(kv_cache, block_id) for block_id in range(4)] == [before[2], before[0], before[5], before[5]]
    assert block_bytes(kv_cache, 4) == untouched


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_round_trip_over_a_gpus_stream_changes_no_bit() -> None:
    device = torch.device("cuda")
    kv_cache = StateStore(SHAPE, 6, device)
    host = HostUnits(kv_cache.block_tensors, 4, device)
    fill(kv_cache)
    caches = [cache for layer in kv_cache.states for cache in (layer["keys"], layer["values"])]
    before = [cache[5].cpu() for cache in caches]
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        host.offload([(5, 2)])
        fill(kv_cache)
        host.onboard([(2, 1)])
    torch.cuda.synchronize()
    assert all(torch.equal(old, cache[1].cpu()) for old, cache in zip(before, caches, strict=True))


def test_no_file_can_be_seen_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    host = HostUnits(StateStore(SHAPE, 2, CPU).block_tensors, 2, CPU)
    assert os.listdir(tmp_path) == []
    assert host.num_units == 2


def test_pinned_memory_is_bounded_by_the_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_units, "free_memory", lambda device, num_ranks: 2**30 // num_ranks)
    config = EngineConfig(kv_cache_host_memory_bytes=2**29, tensor_parallel_size=2)
    with pytest.raises(ConfigurationError, match=r"0\.50 GiB of the host's memory for each rank, but only 0\.38 GiB"):
        count_host_units(config, SHAPE, Units(10, None), ParallelGroups(), torch.device("cuda"))


@pytest.mark.parametrize("region_blocks", [1, 3])
def test_blocks_may_lie_in_several_regions(region_blocks: int) -> None:
    kv_cache = StateStore(SHAPE, 6, CPU)
    host = HostUnits(kv_cache.block_tensors, 5, CPU)
    host._region_units = region_blocks
    host._regions = list(host._regions[0].split(region_blocks))
    fill(kv_cache)
    before = [block_bytes(kv_cache, block_id) for block_id in range(5)]
    host.offload([(block_id, block_id) for block_id in range(5)])
    fill(kv_cache)
    host.onboard([(block_id, block_id) for block_id in range(5)])
    assert [block_bytes(kv_cache, block_id) for block_id in range(5)] == before


def test_host_memory_is_split_between_blocks_and_states_as_the_device_is() -> None:
    state = StateSpec(unit=Unit.SEQUENCE, tensors=(TensorSpec("recurrent", (3, 100), torch.float32),))
    shape = StateShape(specs=(*SPECS, state), block_size=BLOCK_SIZE)
    own_bytes = 40 * shape.block_bytes + 5 * shape.slot_bytes
    config = EngineConfig(kv_cache_host_memory_bytes=3 * own_bytes)
    assert count_host_units(config, shape, Units(40, 5), ParallelGroups(), CPU) == (120, 15)
    states_alone = StateShape(specs=(state,), block_size=BLOCK_SIZE)
    config = EngineConfig(kv_cache_host_memory_bytes=10 * state.num_bytes)
    assert count_host_units(config, states_alone, Units(40, 5), ParallelGroups(), CPU) == (80, 10)
    config = EngineConfig(kv_cache_host_memory_bytes=own_bytes // 5 - 1)
    with pytest.raises(ConfigurationError, match=r"no room for one block of \d+ bytes and one state of 1200 bytes, of"):
        count_host_units(config, shape, Units(40, 5), ParallelGroups(), CPU)


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("num_bytes", "break_disk", "sentence"),
    [(100, False, "has no room for one block of"), (HOST_BYTES, True, "No space left on device")],
)
def test_too_little_room_is_said_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, break_disk: bool, sentence: str
) -> None:
    if break_disk:
        monkeypatch.setattr(os, "posix_fallocate", _no_space)
    with pytest.raises(ConfigurationError, match="kv_cache_host_memory_bytes") as caught:
        small_engine(folder, partial=False, host_bytes=num_bytes)
    assert sentence in str(caught.value)
