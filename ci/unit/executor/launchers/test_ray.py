"""Ranks in Ray, as far as that goes without Ray: what is refused, and the actor on another machine than the front's."""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from free_ports import free_port

from inflight.config import EngineConfig
from inflight.distributed.host_address import interface_of
from inflight.distributed.joining import AppointedMeeting, Meeting
from inflight.errors import ConfigurationError
from inflight.executor.executor import make_launcher
from inflight.executor.launchers.ray_driver import find_cluster
from inflight.executor.launchers.ray_rank import RayRank
from inflight.executor.wire.launch import Launch


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(ConfigurationError, match=r"needs Ray in this environment: pip install 'inflight\[ray\]'"):
        make_launcher(EngineConfig(executor="ray")).open()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"ray_placement": "spread"}, "ray_placement is for executor ray: set executor to ray"),
        ({"executor": "ray", "ray_placement": "strict"}, "ray_placement must be one of pack, spread"),
        ({"executor": "ray", "ray_address": "ray://10.0.0.1:10001"}, "not a Ray client's ray://"),
        ({"executor": "ray", "mpi_hostfile": "hosts"}, "executor ray does without it: unset mpi_hostfile"),
        ({"executor": "ray", "gpu_device_ids": "0"}, "leave gpu_device_ids unset"),
        ({"executor": "ray", "ray_runtime_env": "[1]"}, "ray_runtime_env must be a JSON object"),
        ({"executor": "ray", "ray_runtime_env": '{"env_vars": {"A": 1}}'}, 'must be a JSON object, with "env_vars"'),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        EngineConfig(**keys)


class TestCluster:
    @pytest.fixture(autouse=True)
    def nowhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def note(self, folder: Path, address: str) -> None:
        (folder / "ray").mkdir()
        (folder / "ray" / "ray_current_cluster").write_text(address)

    def test_without_one_it_is_started_here(self, tmp_path: Path) -> None:
        assert find_cluster("auto") is None
        self.note(tmp_path, f"127.0.0.1:{free_port()}")  # of one that was killed
        assert find_cluster("auto") is None

    def test_one_that_is_noted_or_named_is_joined(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as cluster:
            address = f"127.0.0.1:{cluster.getsockname()[1]}"
            assert find_cluster(address) == address
            self.note(tmp_path, address)
            assert find_cluster("auto") == address
            assert find_cluster("local") is None
            monkeypatch.setenv("RAY_ADDRESS", "local")
            assert find_cluster("auto") is None
            monkeypatch.setenv("RAY_ADDRESS", address)
            assert find_cluster("auto") == address

    def test_one_that_is_named_and_not_there_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        address = f"127.0.0.1:{free_port()}"
        with pytest.raises(ConfigurationError, match=f"no Ray cluster answers at ray_address {address}"):
            find_cluster(address)
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigurationError, match="or set it to local"):
            find_cluster("auto")


def test_replicas_leave_it_to_ray_which_gpus_they_get() -> None:
    config = EngineConfig(executor="ray", data_parallel_size=2, tensor_parallel_size=2)
    assert config.of_replica(1) == config and config.launcher == "ray"


@pytest.mark.slow
def test_the_reason_of_a_rank_on_another_machine_reaches_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        launch = Launch(
            directory="/nowhere",
            front_pid=1,
            front_host="another machine",
            joining=AppointedMeeting(),
            parameters=EngineConfig(gpt_model_path="/nowhere", executor="ray").to_parameters(),
        )
        meeting = msgspec.json.encode(Meeting()).decode()
        reason, is_misconfigured = RayRank().serve(launch.to_environment(), 0, meeting, "127.0.0.1")
        assert "/nowhere" in reason and is_misconfigured
        assert os.listdir(folder) == []


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") == ""
