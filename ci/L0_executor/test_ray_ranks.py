"""Ranks in a Ray cluster of two machines: the tokens of one rank, also when a machine dies and another node comes.

The second machine is a network namespace of this one, or where there can be none a second node of Ray here.

pytest ci/L0_executor/test_ray_ranks.py
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from calls import until
from real_engine import CHECKPOINT, PATIENCE, Engine, listening_addresses, rank_pids

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.in_process import InProcessExecutor
from inflight.request import Request
from inflight.run_directory import RUN_DIRECTORY
from inflight.supervisor import processes

pytest.importorskip("ray", reason="Ray is not installed here: pip install 'inflight[ray]'")

from ray_cluster import RayCluster, ray_cluster

PROMPT = [10, 20, 30]
LONG = 400
"""Tokens: enough that the request is still in flight when a node dies."""
TWO_NODES = {
    "executor": "ray",
    "tensor_parallel_size": "2",
    "ray_placement": "spread",
    "dtype": "float32",
    "cpu_compile": "false",
}
"""Layers in torch, as between machines, also when both ranks come back on one."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The engines' run directory, in which nothing may be left."""
    with tempfile.TemporaryDirectory(prefix="run-") as path:
        monkeypatch.setenv(RUN_DIRECTORY, path)
        yield Path(path)
        assert os.listdir(path) == []


def test_streams_go_on_with_the_same_tokens_when_a_node_dies(cluster: RayCluster, folder: Path) -> None:
    expected = tokens_of_one_rank()
    kill = cluster.add_far_node()
    engine = Engine(folder, ray_address=cluster.address, **TWO_NODES)
    engine.executor.start()
    try:
        ranks = rank_pids(engine.executor.engine_pids())
        assert 0 in ranks
        assert {address for pid in ranks.values() for address in listening_addresses(pid)} <= {
            cluster.host,
            "127.0.0.1",
        }
        stream = engine.submit(PROMPT, LONG, streaming=True)
        engine.wait_for_first([stream])
        kill()
        assert engine.deaths.acquire(timeout=PATIENCE)
        assert not engine.executor.is_ready() and engine.executor.num_requests_in_flight() == 1
        cluster.add_node()
        assert engine.tokens(stream) == expected
    finally:
        engine.executor.shutdown()
    assert engine.executor.engine_pids() == []
    until(lambda: cluster.free_cpus() == 2, "Ray has got back both places")


def test_a_cluster_that_is_started_here_is_on_loopback_and_ends_with_its_driver(folder: Path) -> None:
    engine = Engine(folder, executor="ray", ray_address="local", tensor_parallel_size="2", dtype="float32")
    engine.executor.start()
    try:
        everything = engine.executor.engine_pids()
        names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in everything}
        assert any(b"raylet" in name for name in names.values())
        listening = {address for pid in everything for address in listening_addresses(pid)}
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
        stream = engine.submit(PROMPT, LONG, streaming=True)
        engine.wait_for_first([stream])
        (driver,) = (pid for pid, name in names.items() if b"ray_driver" in name)
        os.kill(driver, signal.SIGKILL)
        assert engine.tokens(stream) == tokens_of_one_rank()
        until(lambda: not any(map(processes.is_alive, everything)), "the first cluster has ended")
    finally:
        engine.executor.shutdown()
    assert engine.executor.engine_pids() == []


def test_a_cluster_that_does_not_answer_is_named(folder: Path) -> None:
    engine = Engine(folder, ray_address="127.0.0.1:1", executor="ray")
    with pytest.raises(ConfigurationError, match="no Ray cluster answers at ray_address 127"):
        engine.executor.start()


def tokens_of_one_rank() -> list[int]:
    config = EngineConfig(
        gpt_model_path=str(CHECKPOINT), device="cpu", dtype="float32", num_threads=1, max_tokens_in_paged_kv_cache=4096
    )
    with InProcessExecutor(config=config) as executor:
        request = Request(request_id=executor.next_request_id(), input_token_ids=PROMPT, max_tokens=LONG)
        executor.enqueue_request(request)
        (response,) = executor.await_responses(request.request_id, timeout=300)
    assert response.result is not None, response.error_msg
    return list(response.result.output_token_ids)
