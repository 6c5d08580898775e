"""What the host and a container have left, and the KV cache that is taken from it at the start.

Run: pytest ci/unit/runtime/test_host_memory.py
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch

from inflight import available_memory as memory
from inflight.available_memory import available_memory
from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError, InsufficientMemory
from inflight.layers.attention import KeyValueSpec
from inflight.runtime import state_store
from inflight.runtime.device import free_memory, resident_memory
from inflight.runtime.loading import RankResources, load_engine
from inflight.runtime.state_store import SPARE_CPU_BYTES, StateShape, StateStore

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SPEC = KeyValueSpec(num_kv_heads=2, head_dim=32, dtype=torch.bfloat16).state_spec
SHAPE = StateShape(specs=(SPEC,) * 4, block_size=16)
MIB = 2**20


def own_memory() -> int:
    """Resident bytes of this process, once earlier tests' garbage is gone. Pages of files do not count: the system
    drops them when others need memory."""
    gc.collect()
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def test_what_is_configured_is_resident_from_the_start() -> None:
    num_blocks = 128 * MIB // SHAPE.block_bytes
    before = own_memory()
    cache = StateStore(SHAPE, num_blocks, CPU)
    grown = own_memory() - before
    assert abs(grown - num_blocks * SHAPE.block_bytes) < 16 * MIB
    for layer in cache.states:
        layer["keys"].fill_(1.0)
        layer["values"].fill_(2.0)
        assert (layer["keys"] == 1.0).all()  # they do not overlap
    assert own_memory() - before < grown + 64 * MIB  # of comparisons, and of what earlier tests left to free
    assert resident_memory() > grown


def test_a_cache_begins_with_zeros() -> None:
    for layer in StateStore(SHAPE, 3, CPU).states:
        for tensor in (layer["keys"], layer["values"]):
            assert tensor.shape == (4, 16, 2, 32) and tensor.dtype == torch.bfloat16
            assert tensor.is_contiguous() and not tensor.any()


def test_a_deferred_cache_takes_its_memory_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    num_blocks = 128 * MIB // SHAPE.block_bytes
    before = own_memory()
    cache = StateStore(SHAPE, num_blocks, CPU, is_deferred=True)
    keys = cache.states[1]["keys"]
    keys[5] = 3.0
    assert own_memory() - before < 16 * MIB
    cache.occupy()
    deadline = time.monotonic() + 120
    while own_memory() - before < 120 * MIB:
        assert time.monotonic() < deadline, "it took none"
    assert (keys[5] == 3.0).all() and not keys[6].any()
    monkeypatch.setattr(state_store, "available_memory", lambda: SPARE_CPU_BYTES + 127 * MIB)
    with pytest.raises(InsufficientMemory, match=r"takes 0\.13 GiB; 0\.13 GiB .* only 0\.12 GiB"):
        cache.occupy()


def test_memory_that_is_not_there_is_said_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    num_blocks = 1024 * MIB // SHAPE.block_bytes - 1
    monkeypatch.setattr(state_store, "available_memory", lambda: SPARE_CPU_BYTES + 1024 * MIB - 1)
    monkeypatch.setattr(state_store.HugePageArena, "take", lambda *_: pytest.fail("took some"))
    with pytest.raises(ConfigurationError) as caught:
        StateStore(SHAPE, num_blocks, CPU)
    assert str(caught.value) == (
        "the KV cache takes 1.00 GiB; 1.00 GiB of it are not allocated yet, but only 1.00 GiB of memory are available; "
        "lower max_tokens_in_paged_kv_cache or kv_cache_free_gpu_mem_fraction, or free memory"
    )


def test_memory_that_others_take_meanwhile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2048 * MIB, 2048 * MIB, 512 * MIB]
    monkeypatch.setattr(state_store, "available_memory", lambda: left.pop(0) + SPARE_CPU_BYTES)
    taken: list[int] = []
    monkeypatch.setattr(
        state_store.HugePageArena,
        "take",
        lambda _, count, dtype: taken.append(count) or torch.empty(count, dtype=dtype),
    )
    with pytest.raises(ConfigurationError, match=r"takes 1\.00 GiB; 0\.75 GiB .* only 0\.50 GiB"):
        StateStore(SHAPE, 1024 * MIB // SHAPE.block_bytes - 1, CPU)
    assert len(taken) == 2


def test_a_gpu_has_no_room_for_spare_ranks() -> None:
    config = EngineConfig(spare_ranks=1, max_tokens_in_paged_kv_cache=4096)
    with pytest.raises(ConfigurationError, match="spare_ranks is for ranks on CPUs"):
        load_engine(config, SingleRank(), resources=RankResources(device=torch.device("cuda", 0)))


# -- control groups ----------------------------------------------------------------------------------------------------


def write_group(folder: Path, limit: str, used: int, files: int, *, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, str(used)), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file {files - 1}\n{prefix}active_file 1\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty root of control groups, with plenty of memory on the machine."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "_host_available", lambda: 10**12)
    return tmp_path / "cgroup"


def enter(groups: Path, *lines: str) -> None:
    (groups.parent / "own").write_text("".join(f"{line}\n" for line in lines))


def test_a_container_sees_its_own_group_as_the_root(groups: Path) -> None:
    enter(groups, "0::/")
    write_group(groups, "1000", 600, 150, version=2)
    assert available_memory() == 1000 - 600 + 150
    assert free_memory(CPU, 2) == 275


def test_the_smallest_limit_around_a_group_holds(groups: Path) -> None:
    enter(groups, "0::/system.slice/llm.service")
    write_group(groups / "system.slice", "5000", 1000, 10, version=2)
    write_group(groups / "system.slice" / "llm.service", "max", 900, 10, version=2)
    assert available_memory() == 4010
    write_group(groups / "system.slice" / "llm.service", "2000", 900, 10, version=2)
    assert available_memory() == 1110


def test_the_first_version_of_control_groups(groups: Path) -> None:
    enter(groups, "9:cpu,cpuacct:/", "4:memory:/docker/abc", "0::/")
    write_group(groups / "memory" / "docker" / "abc", "3000", 3500, 100, version=1)
    assert available_memory() == 0
    write_group(groups / "memory" / "docker" / "abc", "3000", 500, 100, version=1)
    assert available_memory() == 2600


def test_a_path_that_a_container_does_not_see_leads_to_its_root(groups: Path) -> None:
    enter(groups, "4:memory:/docker/abc")
    write_group(groups / "memory", "3000", 500, 100, version=1)
    assert available_memory() == 2600


def test_without_control_groups_the_machine_counts(groups: Path) -> None:
    assert available_memory() == 10**12
    enter(groups, "0::/somewhere")
    assert available_memory() == 10**12
