"""Embeddings: hidden states of the prompt as one vector for each text."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from openai_server import PlayedEngine, Running, checkpoint_folder, openai_server

from inflight.engine_description import EngineDescription
from inflight.openai.embeddings import pooled
from inflight.request import Request
from inflight.result import FinishReason, NamedTensor, Response, Result

SIZE = 3


def states(token_ids: list[int]) -> np.ndarray:
    return np.array([[token, 1, -token] for token in token_ids], np.float32)


def play(request: Request) -> list[Response]:
    """Each token's state is made of its id."""
    result = Result(
        output_token_ids=[65],
        tensors=[
            NamedTensor.of("context_hidden_states", states(request.input_token_ids)),
            NamedTensor.of("hidden_states", np.zeros((1, SIZE), np.float32)),
        ],
        finish_reason=FinishReason.LENGTH,
        is_final=True,
        is_sequence_final=True,
    )
    return [Response(request_id=request.request_id, result=result)]


def engine() -> PlayedEngine:
    played = PlayedEngine(play)
    limits = msgspec.structs.replace(played.limits, hidden_size=SIZE, model_outputs=["hidden_states"])
    played._replica_ready(limits, EngineDescription(device="cpu"), max_in_flight=0)
    return played


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    played = engine()
    with openai_server(played, checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))) as url:
        yield Running(url, played)


def test_what_is_cut_before_its_vector_is_there_fails_with_a_sentence(tmp_path: Path) -> None:
    def cut(request: Request) -> list[Response]:
        ended = Result(finish_reason=FinishReason.TIMED_OUT, is_final=True, is_sequence_final=True)
        return [Response(request_id=request.request_id, result=ended)]

    played = engine()
    played.script = cut
    with openai_server(played, checkpoint_folder(tmp_path), max_request_seconds=2.5) as url:
        response = Running(url, played).post("/v1/embeddings", {"input": "ab"})
    assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout_error")
    assert played.sent.allotted_time_ms == 2500


def test_the_sdk_gets_the_same_vectors_in_both_encodings(embedding: Running) -> None:
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none") as client:
        packed = client.embeddings.create(model="llm", input=["ab", "c"])
        plain = client.embeddings.create(model="llm", input=["ab", "c"], encoding_format="float")
    expected = [pooled(states([*text]), "mean") for text in (b"ab", b"c")]
    for answer in (packed, plain):
        assert [each.index for each in answer.data] == [0, 1]
        np.testing.assert_array_equal(np.array([each.embedding for each in answer.data], np.float32), expected)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)
    assert embedding.engine.requests[-1].max_tokens == 1


def test_token_ids_and_base64(embedding: Running) -> None:
    body = {"input": [[97, 98], [99]], "encoding_format": "base64"}
    data = embedding.post("/v1/embeddings", body).json()["data"]
    vector = np.frombuffer(base64.b64decode(data[1]["embedding"]), "<f4")
    np.testing.assert_array_equal(vector, pooled(states([99]), "mean"))


def test_the_last_state_may_be_the_vector(tmp_path: Any) -> None:
    played = engine()
    with openai_server(played, checkpoint_folder(tmp_path), embedding_pooling="last") as url:
        data = Running(url, played).post("/v1/embeddings", {"input": "abc"}).json()["data"]
    np.testing.assert_array_equal(np.array(data[0]["embedding"], np.float32), pooled(states([99]), "mean"))


def test_vectors_have_length_1() -> None:
    for pooling in ("mean", "last"):
        assert np.linalg.norm(pooled(states([1, 2, 3]), pooling)) == pytest.approx(1)
    assert not pooled(np.zeros((2, 3)), "mean").any()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": "x" * 600}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "a", "wrong": 1}, "wrong"),
        ({"input": "a", "model": "b"}, "model"),
    ],
)
def test_wrong_bodies(embedding: Running, body: dict[str, Any], param: str) -> None:
    response = embedding.post("/v1/embeddings", body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_a_network_without_hidden_states_has_none(running: Running) -> None:
    response = running.post("/v1/embeddings", {"input": "a"})
    assert response.status_code == 400
    assert "no hidden states" in response.json()["error"]["message"]
