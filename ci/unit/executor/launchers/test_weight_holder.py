"""What a front holds for its ranks' weights: anew when the checkpoint changes or ranks fail on it, gone at the end.

Run: pytest ci/unit/executor/launchers/test_weight_holder.py
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import fake_rank
import pytest

from inflight.config import EngineConfig
from inflight.distributed.shared_memory import open_place
from inflight.executor.launchers.processes import ProcessLauncher
from inflight.executor.launchers.uniproc import UniProc
from inflight.executor.launchers.weight_holder import WeightHolder


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return EngineConfig(gpt_model_path=str(tmp_path), tensor_parallel_size=2, data_parallel_size=2)


def num_held() -> int:
    links = (os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if is_open(name))
    return sum("inflight-weights" in link for link in links)


def is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_each_rank_of_a_replica_has_memory_until_the_end(config: EngineConfig) -> None:
    before = num_held()
    holder = WeightHolder(config)
    places = holder.places()
    assert len(set(places)) == 2 and holder.places() == places
    for place in places:
        os.close(open_place(place))
    assert num_held() == before + 2
    holder.close()
    assert num_held() == before
    assert [open_place(place) for place in places] == [-1, -1]


def test_nothing_is_held_unless_weights_are_shared(config: EngineConfig) -> None:
    assert WeightHolder(replace(config, share_weights=False)).places() == []


@pytest.mark.parametrize("change", ["write", "add", "remove", "touch"])
def test_a_changed_checkpoint_gets_new_memory(config: EngineConfig, change: str) -> None:
    holder = WeightHolder(config)
    places = holder.places()
    (Path(config.gpt_model_path) / "notes.txt").write_text("of no concern")
    assert holder.places() == places
    weights = Path(config.gpt_model_path) / "model.safetensors"
    match change:
        case "write":
            weights.write_bytes(b"changed")
        case "add":
            weights.with_name("more.safetensors").touch()
        case "remove":
            weights.unlink()
        case "touch":
            os.utime(weights, (1, 1))
    assert not set(holder.places()) & set(places)
    assert [open_place(place) for place in places] == [-1, -1]
    holder.close()


@pytest.mark.slow
def test_what_ranks_could_not_use_is_not_left_to_the_next_ones(config: EngineConfig) -> None:
    launcher = ProcessLauncher(
        replace(config, tensor_parallel_size=1, data_parallel_size=1), UniProc([fake_rank.__file__])
    )
    launches = [launcher.open()]
    launches[0].processes.launch.note_failure("other code has written them", is_of_weights=True)
    launches[0].end()
    for _ in range(2):
        launches.append(launcher.open())
        launches[-1].publish()
        launches[-1].processes.launch.note_failure("memory was short")
        launches[-1].end()
    launcher.close()
    places = [launch.processes.launch.weights for launch in launches]
    assert places[0] != places[1] == places[2]
    assert [launch.processes.launch.is_relaunch for launch in launches] == [False, False, True]
