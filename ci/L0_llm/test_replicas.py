"""Two replicas behind a tritonserver: the tokens of one, and when one is killed its streams go on at the other.

pytest ci/L0_llm/test_replicas.py
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from raw_stream import Answer, RawStream
from server_metrics import Metrics, wait_for_rest
from server_process import ServerProcess
from waiting import until
from workload import alone, mixed_requests, together

from inflight_client import Client

NUM_TOKENS, STREAMS = 800, 2
"""So many tokens that a stream does not end before a replica is killed."""


@pytest.fixture(scope="module")
def replicas() -> Iterator[ServerProcess]:
    """With a model of another dialect, whose stub attaches to both."""
    with ServerProcess(parameters={"data_parallel_size": "2"}, apis=["tensorrtllm"]) as running:
        yield running


def pieces(answer: Answer) -> str:
    """The text of a model with a batch dimension."""
    return "".join(response["text_output"].flat[0].decode() for response in answer.responses)


def ready(server: ServerProcess) -> dict[str, float]:
    return Metrics(server).by_label("inflight_replica_ready", "replica")


def test_two_replicas_give_the_tokens_of_one(client: Client, replicas: ServerProcess) -> None:
    requests = mixed_requests(8, seed=4)
    expected = alone(client, requests)
    with Client(replicas.grpc_url, timeout=120) as remote:
        assert together(remote, requests, 8) == [expected[asked] for asked in requests]
    assert len(replicas.ranks) == 2 and ready(replicas) == {"0": 1.0, "1": 1.0}
    metrics = wait_for_rest(replicas)
    assert metrics.of("nv_trt_llm_request_metrics", request_type="max") == 2 * 64


@pytest.mark.parametrize("index", [0, 1])
def test_streams_of_a_killed_replica_go_on_at_the_other_and_nobody_waits(replicas: ServerProcess, index: int) -> None:
    """In llm and in the model that attaches to it; each gets what it gets alone."""
    asked: list[dict[str, Any]] = [
        {
            "text_input": f"Story {number}:",
            "max_tokens": NUM_TOKENS,
            "end_id": -1,
            "stream": True,
            "temperature": 1.0,
            "seed": np.array([number], np.uint64),
        }
        for number in range(STREAMS)
    ]
    until(lambda: all(ready(replicas).values()), "both serve")
    before = Metrics(replicas)
    other = {
        "text_input": np.array([["Once upon a time"]], np.object_),
        "max_tokens": np.array([[NUM_TOKENS]], np.int32),
        "stream": np.array([[True]]),
    }
    with RawStream(replicas.grpc_url) as stream:
        expected = [stream.ask(inputs).token_ids for inputs in asked]
        text = pieces(stream.ask(other, model="ensemble"))
        victim = sorted(replicas.ranks)[index]
        running = [stream.send(inputs) for inputs in asked]
        attached = stream.send(other, model="ensemble")
        while not all(answer.responses for answer in (*running, attached)):
            stream.take()
        os.kill(victim, signal.SIGKILL)
        for answer, tokens in zip(running, expected, strict=True):
            stream.collect(answer)
            assert (answer.error, answer.num_finals, answer.token_ids) == ("", 1, tokens)
        stream.collect(attached)
        assert attached.error == "" and pieces(attached) == text

    def change(name: str) -> float:
        return Metrics(replicas).of(name) - before.of(name)

    until(lambda: change("inflight_engine_relaunches_total") == 1, "the relaunch is counted")
    until(lambda: change("inflight_request_replays_total") > 0, "its streams' replays are counted")
    assert change("inflight_engine_pauses_total") == 0
    until(lambda: Metrics(replicas).of("inflight_engine_ready") == 1, "the engine serves all along")
    until(lambda: all(ready(replicas).values()), "the killed one is back")
