"""Embeddings: hidden states of the prompt as one vector for each text."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ollama
import openai
import pytest
from openai_server import PlayedEngine, Running, checkpoint_folder, openai_server

from inflight.asking.sentence_files import find_pooling
from inflight.asking.vectors import of_length_1
from inflight.engine_description import EngineDescription
from inflight.errors import ConfigurationError
from inflight.request import Request
from inflight.result import FinishReason, NamedTensor, Response, Result

SIZE = 3


def states(token_ids: list[int]) -> np.ndarray:
    return np.array([[token, 1, -token] for token in token_ids], np.float32)


def mean(text: bytes) -> np.ndarray:
    return of_length_1(states([*text]).mean(axis=0))


def play(request: Request) -> list[Response]:
    """Each token's state is made of its id."""
    (asked,) = request.output_config.additional_model_outputs
    found, name = states(request.input_token_ids), asked.name
    if asked.pooling is None:
        found = found[-1:]
    else:
        assert asked.pooling == "mean"
        found, name = found[asked.first :].mean(axis=0, keepdims=True), f"pooled_{name}"
    result = Result(
        output_token_ids=[65],
        tensors=[NamedTensor.of(name, found)],
        finish_reason=FinishReason.LENGTH,
        is_final=True,
        is_sequence_final=True,
    )
    return [Response(request_id=request.request_id, result=result)]


def engine(**changes: Any) -> PlayedEngine:
    """`changes`: of its limits."""
    played = PlayedEngine(play)
    limits = msgspec.structs.replace(played.limits, hidden_size=SIZE, model_outputs=["hidden_states"], **changes)
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
    expected = [mean(text) for text in (b"ab", b"c")]
    for answer in (packed, plain):
        assert [each.index for each in answer.data] == [0, 1]
        np.testing.assert_array_equal(np.array([each.embedding for each in answer.data], np.float32), expected)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)
    assert embedding.engine.requests[-1].max_tokens == 1


def test_an_encoder_is_asked_for_no_token_and_takes_a_text_as_long_as_its_positions(tmp_path: Path) -> None:
    played = engine(pooled="vectors", max_seq_len=4, max_input_len=4)
    with openai_server(played, checkpoint_folder(tmp_path), embedding_pooling="mean") as url:
        running = Running(url, played)
        vector = running.post("/v1/embeddings", {"input": "abcd"}).json()["data"][0]["embedding"]
        np.testing.assert_array_equal(np.array(vector, np.float32), mean(b"abcd"))
        assert played.sent.max_tokens == 0
        too_long = running.post("/v1/embeddings", {"input": "abcde"}).json()["error"]
        assert (too_long["param"], too_long["code"]) == ("input", "context_length_exceeded")
        assert "maximum context length is 4 tokens" in too_long["message"] and "completion" not in too_long["message"]
        cut = running.post("/api/embed", {"model": "llm", "input": "abcde"}).json()
        assert cut["prompt_eval_count"] == len(played.sent.input_token_ids) == 4
        one = running.post("/api/embeddings", {"model": "llm", "prompt": "abcde"}).json()
        assert one == {"embedding": cut["embeddings"][0]}
        refused = running.post("/v1/completions", {"prompt": "ab", "max_tokens": 3}).json()["error"]
        assert (refused["param"], refused["message"].partition(":")[0]) == (
            "model",
            "this model is an encoder, which writes no text",
        )


def test_ollamas_package_gets_one_vector_as_before_it_could_get_several(embedding: Running) -> None:
    client = ollama.Client(host=embedding.url, trust_env=False)
    vector = client.embeddings("llm:latest", "abcd", options={"num_ctx": 8}, keep_alive=5).embedding
    np.testing.assert_array_equal(np.array(vector, np.float32), mean(b"abcd"))
    assert client.embeddings("llm").embedding == [], "which loads the model"
    with pytest.raises(ollama.ResponseError, match="model 'other' not found"):
        client.embeddings("other", "a")


def test_token_ids_and_base64(embedding: Running) -> None:
    body = {"input": [[97, 98], [99]], "encoding_format": "base64"}
    data = embedding.post("/v1/embeddings", body).json()["data"]
    vector = np.frombuffer(base64.b64decode(data[1]["embedding"]), "<f4")
    np.testing.assert_array_equal(vector, mean(b"c"))


def test_dimensions_are_the_first_features_at_length_1(embedding: Running) -> None:
    data = embedding.post("/v1/embeddings", {"input": "ab", "dimensions": 2}).json()["data"]
    vector = np.array(data[0]["embedding"], np.float32)
    np.testing.assert_allclose(vector, mean(b"ab")[:2] / np.linalg.norm(mean(b"ab")[:2]), rtol=1e-6)


@pytest.mark.parametrize("by_files", [True, False])
def test_the_last_state_may_be_the_vector(tmp_path: Path, by_files: bool) -> None:
    played, folder = engine(), checkpoint_folder(tmp_path)
    if by_files:
        write_files(folder, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False})
    with openai_server(played, folder, embedding_pooling="" if by_files else "last") as url:
        data = Running(url, played).post("/v1/embeddings", {"input": "abc"}).json()["data"]
    np.testing.assert_array_equal(np.array(data[0]["embedding"], np.float32), mean(b"c"))


def write_files(folder: Path, pooling: object, *more: str) -> None:
    """As sentence-transformers writes them. `more`: kinds of modules behind the usual ones."""
    kinds = [f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Normalize", *more)]
    (folder / "modules.json").write_text(json.dumps([{"type": kind} for kind in kinds]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode": "weightedmean"}, "weighted_mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}, "cls"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
    ],
)
def test_pooling_is_what_the_checkpoints_files_say(tmp_path: Path, config: object, expected: str) -> None:
    assert find_pooling(tmp_path) == "mean"
    write_files(tmp_path, config)
    assert find_pooling(tmp_path) == expected


@pytest.mark.parametrize(
    ("config", "more", "sentence"),
    [
        (
            {"pooling_mode_mean_sqrt_len_tokens": True},
            [],
            "asks for mean_sqrt_len, which is not computed here: set embedding_pooling",
        ),
        ({"pooling_mode": ["mean", "max"]}, [], "asks for mean and max"),
        ({}, [], "asks for nothing"),
        ({"pooling_mode": "mean"}, ["Dense"], "has a Dense, which is not computed here"),
        ({"pooling_mode": "a\nb" * 1000}, [], r"asks for (a\\nb)+a?\.\.\., which"),
        ({"pooling_mode": ["mean", 1]}, [], "pooling_mode in 1_Pooling/config.json of the checkpoint is no name"),
        ([], [], "1_Pooling/config.json cannot be read"),
    ],
)
def test_what_is_not_computed_is_named(tmp_path: Path, config: object, more: list[str], sentence: str) -> None:
    write_files(tmp_path, config, *more)
    with pytest.raises(ConfigurationError, match=sentence):
        find_pooling(tmp_path)


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        ([["Pooling"]], "modules.json cannot be read"),
        ([{"type": 1}], "modules.json cannot be read"),
        ([{"type": "models.Pooling"}], "has a Pooling, and 1_Pooling/config.json is missing: set embedding_pooling"),
    ],
)
def test_nothing_stands_in_for_what_the_modules_do_not_say(tmp_path: Path, modules: object, sentence: str) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigurationError, match=sentence):
        find_pooling(tmp_path)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
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


PROMPTS = {"prompts": {"query": "find: ", "document": "", "Clustering": "kind: "}, "default_prompt_name": "Clustering"}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With prompts before texts."""
    played, folder = engine(), checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    with openai_server(played, folder) as url:
        yield Running(url, played)


@pytest.mark.parametrize(
    ("chosen", "before"),
    [
        ({"prompt_name": "query"}, "find: "),
        ({"input_type": "query"}, "find: "),
        ({"input_type": "search_query"}, "find: "),
        ({"input_type": "passage"}, ""),
        ({"input_type": "search_document"}, ""),
        ({"prompt_name": "Clustering"}, "kind: "),
        ({"input_type": "clustering"}, "kind: "),
        ({}, "kind: "),
    ],
)
def test_a_text_behind_its_prompt_has_the_vector_and_the_tokens_of_both_as_one_text(
    prompted: Running, embedding: Running, chosen: dict[str, str], before: str
) -> None:
    texts = ["ab", "c"]
    with (
        openai.OpenAI(base_url=f"{prompted.url}/v1", api_key="none") as client,
        openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none") as plain,
    ):
        found = client.embeddings.create(model="llm", input=texts, extra_body=chosen)
        expected = plain.embeddings.create(model="llm", input=[before + text for text in texts])
    assert [each.embedding for each in found.data] == [each.embedding for each in expected.data]
    assert found.usage == expected.usage
    assert found.usage.prompt_tokens == sum(len(before + text) for text in texts)


def test_token_ids_have_no_prompt(prompted: Running) -> None:
    found = prompted.post("/v1/embeddings", {"input": [97, 98]}).json()
    assert found["usage"]["prompt_tokens"] == 2
    assert prompted.post("/v1/embeddings", {"input": [97, 98], "input_type": "passage"}).status_code == 200
    error = prompted.post("/v1/embeddings", {"input": [97, 98], "prompt_name": "query"}).json()["error"]
    assert error["param"] == "prompt_name"
    assert error["message"] == "prompt_name is for texts: input holds token ids, which are computed as they are"


def test_what_texts_are_has_no_effect_on_a_model_without_prompts(embedding: Running) -> None:
    for chosen in ({"input_type": "query"}, {"input_type": "passage"}):
        assert embedding.post("/v1/embeddings", {"input": "ab", **chosen}).json()["usage"]["prompt_tokens"] == 2
    assert embedding.post("/v1/embeddings", {"input": "ab", "prompt_name": "query"}).status_code == 400


@pytest.mark.parametrize(
    ("chosen", "param", "sentence"),
    [
        ({"prompt_name": "passage"}, "prompt_name", "no such prompt: it has query, document, Clustering"),
        ({"input_type": "classification"}, "input_type", "no such prompt: it has query, document, Clustering"),
        ({"input_type": "image"}, "input_type", "input_type must be one of query, search_query, passage"),
        ({"input_type": "query", "prompt_name": "query"}, "prompt_name", "both choose a prompt"),
        ({"input": "", "input_type": "query"}, "input", "input is empty"),
        ({"input": "x" * 506, "input_type": "query"}, "input", "maximum context length is 512 tokens"),
    ],
)
def test_wrong_prompts(prompted: Running, chosen: dict[str, str], param: str, sentence: str) -> None:
    response = prompted.post("/v1/embeddings", {"input": "a", **chosen})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert sentence in response.json()["error"]["message"]


DOCUMENT = {"input_type": "document"}


def test_a_vector_may_leave_out_the_tokens_of_prompts(tmp_path: Path) -> None:
    """Which are computed, though: the text's own states depend on them."""
    played, folder = engine(), checkpoint_folder(tmp_path)
    write_files(folder, {"pooling_mode": "mean", "include_prompt": False})
    settings = {"prompts": PROMPTS["prompts"], "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with openai_server(played, folder) as url:
        running = Running(url, played)
        answers = [running.post("/v1/embeddings", {"input": ["ab", "b"], **more}).json() for more in ({}, DOCUMENT)]
        rows = running.post("/v1/embeddings", {"input": [[97, 98]]}).json()
        of_ollama = running.post("/api/embed", {"model": "llm", "input": "ab"}).json()["embeddings"][0]
        pair = running.post("/score", {"text_1": "ab", "text_2": "b"}).json()["data"][0]["score"]
    for answer in answers:
        for each, text in zip(answer["data"], (b"ab", b"b"), strict=True):
            np.testing.assert_array_equal(np.array(each["embedding"], np.float32), mean(text))
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [len("find: ab" + "find: b"), 3]
    np.testing.assert_array_equal(np.array(rows["data"][0]["embedding"], np.float32), mean(b"ab"))
    np.testing.assert_allclose(of_ollama, mean(b"ab"), rtol=1e-6)
    assert pair == pytest.approx(float(mean(b"ab") @ mean(b"b")), abs=1e-6)
    firsts = [request.output_config.additional_model_outputs[0].first for request in played.requests]
    assert firsts == [6, 6, 0, 0, 0, 6, 6, 0], "a document has an empty prompt here"
    with openai_server(engine(), folder, embedding_pooling="mean") as url:
        found = Running(url, played).post("/v1/embeddings", {"input": "ab", "input_type": "query"}).json()
    np.testing.assert_array_equal(np.array(found["data"][0]["embedding"], np.float32), mean(b"find: ab"))


def test_ollamas_texts_stand_behind_the_default_prompt_which_is_never_cut(prompted: Running) -> None:
    client = ollama.Client(host=prompted.url, trust_env=False)
    found = client.embed("llm", ["ab"])
    np.testing.assert_allclose(found.embeddings[0], mean(b"kind: ab"), rtol=1e-6)
    assert found.prompt_eval_count == len("kind: ab")
    client.embed("llm", "x" * 600)
    assert bytes(prompted.engine.sent.input_token_ids) == b"kind: " + b"x" * 505
    with pytest.raises(ollama.ResponseError, match="input is empty"):
        client.embed("llm", "")


def test_ollamas_embeddings_are_the_same_and_long_texts_are_cut(embedding: Running) -> None:
    client = ollama.Client(host=embedding.url, trust_env=False)
    found = client.embed("llm", ["ab", "x" * 600], dimensions=2)
    np.testing.assert_allclose(found.embeddings[0], of_length_1(mean(b"ab")[:2]), rtol=1e-6)
    assert found.prompt_eval_count == 2 + 511 == 2 + len(embedding.engine.sent.input_token_ids)
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed("llm", "x" * 600, truncate=False)
    assert client.embed("llm", "ß" * 600).prompt_eval_count == 511
