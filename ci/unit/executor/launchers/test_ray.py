"""Ranks in Ray, as far as that goes without Ray: what is refused, and the actor on another machine than the front's."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from typing import Any

import msgspec
import pytest

from inflight.config import EngineConfig
from inflight.distributed.host_address import interface_of
from inflight.distributed.joining import AppointedMeeting, Meeting
from inflight.errors import ConfigurationError
from inflight.executor.executor import make_launcher
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
