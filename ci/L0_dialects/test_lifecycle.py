"""A dialect model comes and goes by itself, and with its engine."""

from __future__ import annotations

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

from .conftest import text

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
