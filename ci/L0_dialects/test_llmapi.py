"""The model of TensorRT-LLM's LLM API as its clients use it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from raw_stream import RawStream
from server_process import ServerProcess

from inflight_client import Client

from .conftest import GOLDEN, number, text


@pytest.fixture
def wire(second_server: ServerProcess) -> Iterator[RawStream]:
    with RawStream(second_server.grpc_url) as opened:
        yield opened


def inputs(num_tokens: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "text_input": text(GOLDEN["prompt"], 1),
        "sampling_param_max_tokens": number(num_tokens, np.int32, 1),
        "streaming": number(False, bool, 1),
        **more,
    }


def test_text_with_or_without_its_prompt(wire: RawStream, second_server: ServerProcess) -> None:
    with Client(second_server.grpc_url) as client:
        expected = client.generate(GOLDEN["prompt"], max_tokens=12).text
    assert wire.ask(inputs(12), model="llmapi").text == GOLDEN["prompt"] + expected
    streamed = wire.ask_in_parts(inputs(12, streaming=number(True, bool, 1)), model="llmapi").pieces
    assert streamed[-1] == expected
    assert all(after.startswith(before) for before, after in pairwise(streamed)), "each holds the whole text so far"


def test_metrics_are_text(wire: RawStream) -> None:
    names = ("sampling_param_return_perf_metrics", "finish_reason", "stop_reason", "cumulative_logprob")
    flags = [name if "_param_" in name else f"return_{name}" for name in names]
    (response,) = wire.ask(inputs(4, **{flag: number(True, bool, 1) for flag in flags}), model="llmapi").responses
    assert response["acceptance_rate"].tolist() == [b"0.0"] and response["finish_reason"].tolist() == [b"length"]
    assert int(response["last_token_time_ns"][0]) >= int(response["first_token_time_ns"][0]) > 0
    assert float(response["cumulative_logprob"][0]) < 0 and response["stop_reason"].tolist() == [b"None"]


def test_the_stop_string_is_the_reason(wire: RawStream) -> None:
    flags = {f"return_{reason}_reason": number(True, bool, 1) for reason in ("finish", "stop")}
    answer = wire.ask(inputs(40, sampling_param_stop=np.array([b"#", b" "], object), **flags), model="llmapi")
    assert answer.responses[-1]["stop_reason"].tolist() == [b" "] and answer.finish_reason == "stop"


@pytest.mark.parametrize("request_id", ["17", "4711"])
def test_a_stop_is_answered_with_cancelled(wire: RawStream, request_id: str) -> None:
    stop = wire.ask({"text_input": text("", 1), "stop": number(True, bool, 1)}, request_id=request_id, model="llmapi")
    assert "[CANCELLED]" in stop.error


def test_an_adapter_is_named_not_read_from_a_path(wire: RawStream) -> None:
    answer = wire.ask(inputs(4, lora_path=text("/somewhere", 1)), model="llmapi")
    assert "name an adapter of lora_dir" in answer.error
