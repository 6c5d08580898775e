"""A dialect model comes and goes by itself, and with its engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from raw_stream import RawStream
from server_process import ServerFailed, ServerProcess
from tritonclient.utils import InferenceServerException

from .conftest import number, text

pytestmark = pytest.mark.long

PROMPT = {"text_input": text("Once", 1)}
LONG = {
    "text_input": text("Once", 1),
    "stream": np.array([True]),
    "sampling_parameters": text('{"max_tokens": 300, "ignore_eos": true}', 1),
}
DEADLINE = 120.0
MODELS = ("llm", "vllm_model")


def answers(server: ServerProcess) -> bool:
    with RawStream(server.grpc_url) as wire:
        return not wire.ask(PROMPT, model="vllm_model").error


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ranks(server: ServerProcess) -> list[int]:
    """The processes that run inflight.worker."""
    return [pid for pid in server.pids if b"inflight.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_dialect_model_is_loaded_and_unloaded_by_itself(second_server: ServerProcess) -> None:
    before = ranks(second_server)
    with grpcclient.InferenceServerClient(second_server.grpc_url) as client:
        client.unload_model("vllm_model")
        wait_until(lambda: not client.is_model_ready("vllm_model"))
        assert client.is_model_ready("llm")
        client.load_model("vllm_model")
        assert answers(second_server) and ranks(second_server) == before, "on the ranks that were there"


def test_a_dialect_model_goes_on_with_ranks_that_were_relaunched(second_server: ServerProcess) -> None:
    (old,) = ranks(second_server)
    with RawStream(second_server.grpc_url) as wire:
        streamed = wire.send(LONG, model="vllm_model")
        wire.take()
        os.kill(old, signal.SIGKILL)
        wire.collect(streamed)
        assert streamed.error == "" and streamed.num_finals == 1
    wait_until(lambda: old not in ranks(second_server))
    wait_until(lambda: answers(second_server))
    assert len(ranks(second_server)) == 1


def test_without_its_engine_a_dialect_model_is_not_ready(second_server: ServerProcess) -> None:
    """The supervisor notices that the engine's model is gone, takes the dialect model away and brings both back."""
    with grpcclient.InferenceServerClient(second_server.grpc_url) as client:
        client.unload_model("llm")
        wait_until(lambda: not client.is_model_ready("vllm_model"))
        wait_until(lambda: all(client.is_model_ready(model) for model in MODELS))
    assert answers(second_server)
    assert "model llm serves again" in second_server.told


def test_a_wrong_dialect_model_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="--api has no 'vlm': did you mean vllm"):
        ServerProcess(apis=["vlm"]).start()


def stub_of(server: ServerProcess, model: str) -> int:
    return next(pid for pid, instance in server.stub_pids.items() if instance.startswith(model))


def test_a_dead_stub_of_a_dialect_model_breaks_no_stream_of_another(second_server: ServerProcess) -> None:
    """It held no request: that model alone is loaded again, on the same ranks."""
    asked = {"text_input": "Once upon a time", "max_tokens": 800, "end_id": -1, "stream": True}
    before = second_server.tritonserver_pid, ranks(second_server)
    with RawStream(second_server.grpc_url) as wire, RawStream(second_server.grpc_url) as theirs:
        expected = wire.ask(asked).token_ids
        assert not theirs.ask(PROMPT, model="vllm_model").error
        answer = wire.send(asked)
        while not answer.responses:
            wire.take()
        dead = stub_of(second_server, "vllm_model")
        os.kill(dead, signal.SIGKILL)
        wire.collect(answer)
        assert not answer.error and answer.token_ids == expected
        wait_until(lambda: "model vllm_model serves again" in second_server.told)
        assert not theirs.ask(PROMPT, model="vllm_model").error, "on a stream to the stub that died"
    assert stub_of(second_server, "vllm_model") != dead
    assert (second_server.tritonserver_pid, ranks(second_server)) == before


def test_requests_that_a_dead_stub_held_end_with_an_error(second_server: ServerProcess) -> None:
    """Which only tritonserver's own end gives them, so the whole server is started again."""
    before = second_server.tritonserver_pid
    parameters = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    asked = {**PROMPT, "stream": number(True, bool, 1), "sampling_parameters": text(json.dumps(parameters), 1)}
    with RawStream(second_server.grpc_url) as wire:
        answer = wire.send(asked, model="vllm_model")
        while not answer.responses:
            wire.take()
        os.kill(stub_of(second_server, "vllm_model"), signal.SIGKILL)
        wire.collect(answer)
        assert "UNAVAILABLE" in answer.error
    wait_until(lambda: "left requests without an answer (1)" in second_server.told)
    wait_until(lambda: is_served(second_server))
    assert second_server.tritonserver_pid != before


def is_served(server: ServerProcess) -> bool:
    with grpcclient.InferenceServerClient(server.grpc_url) as client, contextlib.suppress(InferenceServerException):
        return all(client.is_model_ready(model) for model in MODELS)
    return False
