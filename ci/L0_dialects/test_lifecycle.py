"""A dialect model comes and goes by itself, and with its engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from raw_stream import RawStream
from server_process import ServerFailed, ServerProcess
from tritonclient.utils import InferenceServerException
from waiting import until

from .conftest import number, text

pytestmark = pytest.mark.long

PROMPT = {"text_input": text("Once", 1)}
LONG = {
    "text_input": text("Once", 1),
    "stream": np.array([True]),
    "sampling_parameters": text('{"max_tokens": 300, "ignore_eos": true}', 1),
}
MODELS = ("llm", "vllm_model", "ensemble", "tensorrt_llm", "tensorrt_llm_bls", "llmapi")
"""All of the second server that come and go with the engine. A test that takes them away waits until all are back,
because the tests of other files go on with them."""


def answers(server: ServerProcess) -> bool:
    with RawStream(server.grpc_url) as wire:
        return not wire.ask(PROMPT, model="vllm_model").error


def serves_again(server: ServerProcess, model: str) -> Callable[[], bool]:
    """Whether the supervisor has said so since this call."""
    sentence = f"model {model} serves again"
    before = server.told.count(sentence)
    return lambda: server.told.count(sentence) > before


def test_a_dialect_model_is_loaded_and_unloaded_by_itself(second_server: ServerProcess) -> None:
    before = second_server.ranks
    with grpcclient.InferenceServerClient(second_server.grpc_url) as client:
        client.unload_model("vllm_model")
        until(lambda: not is_served(second_server, "vllm_model"), "it is not ready")
        assert client.is_model_ready("llm")
        client.load_model("vllm_model")
        assert answers(second_server) and second_server.ranks == before, "on the ranks that were there"


def test_a_dialect_model_goes_on_with_ranks_that_were_relaunched(second_server: ServerProcess) -> None:
    (old,) = second_server.ranks
    with RawStream(second_server.grpc_url) as wire:
        streamed = wire.send(LONG, model="vllm_model")
        wire.take()
        os.kill(old, signal.SIGKILL)
        wire.collect(streamed)
        assert streamed.error == "" and streamed.num_finals == 1
    until(lambda: old not in second_server.ranks, "the rank has ended")
    until(lambda: answers(second_server), "it answers")
    assert len(second_server.ranks) == 1


def test_without_its_engine_a_dialect_model_is_not_ready(second_server: ServerProcess) -> None:
    """The supervisor notices that the engine's model is gone, takes the dialect model away and brings both back."""
    again = serves_again(second_server, "llm")
    with grpcclient.InferenceServerClient(second_server.grpc_url) as client:
        client.unload_model("llm")
    until(lambda: not is_served(second_server, "vllm_model"), "it is not ready")
    until(lambda: again() and is_served(second_server, *MODELS), "all are back")
    assert answers(second_server)


def test_a_wrong_dialect_model_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="--api has no 'vlm': did you mean vllm"):
        ServerProcess(apis=["vlm"]).start()


def stub_of(server: ServerProcess, model: str) -> int:
    return next(pid for pid, instance in server.stub_pids.items() if instance.startswith(model))


def test_a_dead_stub_of_a_dialect_model_breaks_no_stream_of_another(second_server: ServerProcess) -> None:
    """It held no request: that model alone is loaded again, on the same ranks."""
    asked = {"text_input": "Once upon a time", "max_tokens": 800, "end_id": -1, "stream": True}
    before = second_server.tritonserver_pid, second_server.ranks
    with RawStream(second_server.grpc_url) as wire, RawStream(second_server.grpc_url) as theirs:
        expected = wire.ask(asked).token_ids
        assert not theirs.ask(PROMPT, model="vllm_model").error
        answer = wire.send(asked)
        while not answer.responses:
            wire.take()
        dead, again = stub_of(second_server, "vllm_model"), serves_again(second_server, "vllm_model")
        os.kill(dead, signal.SIGKILL)
        wire.collect(answer)
        assert not answer.error and answer.token_ids == expected
        until(again, "it is loaded again")
        assert not theirs.ask(PROMPT, model="vllm_model").error, "on a stream to the stub that died"
    assert stub_of(second_server, "vllm_model") != dead
    assert (second_server.tritonserver_pid, second_server.ranks) == before


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
    until(lambda: "left requests without an answer (1)" in second_server.told, "the supervisor knows")
    until(lambda: before not in second_server.pids and is_served(second_server, *MODELS), "another server serves")


def is_served(server: ServerProcess, *models: str) -> bool:
    with grpcclient.InferenceServerClient(server.grpc_url) as client, contextlib.suppress(InferenceServerException):
        return all(client.is_model_ready(model) for model in models)
    return False
