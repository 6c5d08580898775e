"""Rerank and score: which texts are read together, what becomes of their scores, and how both are answered."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import numpy as np
import pytest
from openai_server import CLIENT, Running, checkpoint_folder, openai_server
from played_encoder import engine, halves, likeness, tokenizer

from inflight.asking import scoring as scoring_module
from inflight.asking.sentence_files import find_activation
from inflight.errors import ConfigurationError

QUESTION, DOCUMENTS = "ab", ["c", "abd", "ad"]
PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    played = engine()
    with openai_server(played, checkpoint_folder(tmp_path_factory.mktemp("checkpoint")), tokenizer=tokenizer()) as url:
        yield Running(url, played)


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score))


EXPECTED = [likeness(QUESTION.encode(), text.encode()) for text in DOCUMENTS]
ORDER = sorted(range(len(DOCUMENTS)), key=lambda index: -EXPECTED[index])


@pytest.mark.parametrize("path", PATHS)
def test_documents_come_in_the_order_of_their_scores(scoring: Running, path: str) -> None:
    answer = scoring.post(path, {"query": QUESTION, "documents": [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}]}).json()
    assert answer["id"].startswith("rerank-")
    assert answer["model"] == "llm"
    assert [each["index"] for each in answer["results"]] == ORDER
    for each in answer["results"]:
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
        assert each["relevance_score"] == pytest.approx(sigmoid(EXPECTED[each["index"]]), abs=1e-12)
    num_tokens = sum(len(QUESTION + text) for text in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    sent = scoring.engine.requests[-len(DOCUMENTS) :]
    assert {request.max_tokens for request in sent} == {0}
    assert [halves(request) for request in sent] == [(QUESTION.encode(), text.encode()) for text in DOCUMENTS]


def test_only_the_best_are_told_and_their_texts_left_out(scoring: Running) -> None:
    body = {"query": QUESTION, "documents": DOCUMENTS, "top_n": 2, "return_documents": False}
    results = scoring.post("/rerank", body).json()["results"]
    assert [sorted(each) for each in results] == [["index", "relevance_score"]] * 2
    assert [each["index"] for each in results] == ORDER[:2]


def test_coheres_clients_rerank(scoring: Running) -> None:
    for kind in (cohere.Client, cohere.ClientV2):
        client = kind(api_key="none", base_url=scoring.url)
        answer = client.rerank(model="llm", query=QUESTION, documents=DOCUMENTS, top_n=2)
        assert [each.index for each in answer.results] == ORDER[:2]
        assert answer.results[0].relevance_score == pytest.approx(sigmoid(EXPECTED[ORDER[0]]))


@pytest.mark.parametrize(
    ("firsts", "seconds", "pairs"),
    [
        ("ab", ["c", "a"], [("ab", "c"), ("ab", "a")]),
        (["ab"], ["c", "a"], [("ab", "c"), ("ab", "a")]),
        (["ab", "d"], ["c", "a"], [("ab", "c"), ("d", "a")]),
        ("ab", "c", [("ab", "c")]),
    ],
)
def test_scores_stay_in_the_order_of_their_pairs(
    scoring: Running, firsts: object, seconds: object, pairs: list[tuple[str, str]]
) -> None:
    body = {"text_1": firsts, "text_2": seconds, "use_activation": False}
    answer = scoring.post("/v1/score", body).json()
    expected = [likeness(first.encode(), second.encode()) for first, second in pairs]
    assert answer["data"] == [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(expected)
    ]
    assert (answer["object"], answer["model"]) == ("list", "llm")
    with_activation = CLIENT.post(f"{scoring.url}/score", json={"text_1": firsts, "text_2": seconds}).json()
    assert [each["score"] for each in with_activation["data"]] == pytest.approx(list(map(sigmoid, expected)))


def test_without_a_head_for_scores_texts_are_compared_by_their_vectors(tmp_path: Path) -> None:
    played = engine(pooled="vectors", num_labels=0, model_outputs=["hidden_states"])
    with openai_server(played, checkpoint_folder(tmp_path), embedding_pooling="mean") as url:
        results = Running(url, played).post("/rerank", {"query": "ab", "documents": ["c", "ab", "b", "ab"]}).json()
    found = {each["index"]: each["relevance_score"] for each in results["results"]}
    assert found == pytest.approx({0: 0.0, 1: 1.0, 2: math.sqrt(0.5), 3: 1.0}, abs=1e-6)
    assert len(played.requests) == 3, "of each text one vector is enough"
    assert {request.second_text_start for request in played.requests} == {0}


def with_prompts(folder: Path) -> Path:
    """A checkpoint whose file has them."""
    checkpoint_folder(folder)
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "dd ", "passage": "ca "}}')
    return folder


@pytest.mark.parametrize("pooled", ["vectors", ""])
def test_texts_that_are_compared_by_their_vectors_stand_behind_the_models_prompts(tmp_path: Path, pooled: str) -> None:
    played = engine(pooled=pooled, num_labels=0, model_outputs=["hidden_states"])
    with openai_server(played, with_prompts(tmp_path), embedding_pooling="mean") as url:
        answer = Running(url, played).post("/rerank", {"query": "ab", "documents": ["c", "ab", "c"]}).json()
        sent = [bytes(request.input_token_ids) for request in played.requests]
        pair = Running(url, played).post("/score", {"text_1": "ab", "text_2": "ab"}).json()
        cut = Running(url, played).post("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 9})
    assert sent == [b"dd ab", b"ca c", b"ca ab"], "a text is another one as a question"
    assert answer["usage"]["prompt_tokens"] == sum(map(len, sent))
    question = np.array([1, 1, 0, 2])
    for text, counts in ((0, np.array([1, 0, 2, 0])), (1, np.array([2, 1, 1, 0]))):
        found = next(each["relevance_score"] for each in answer["results"] if each["index"] == text)
        cosine = question @ counts / np.linalg.norm(question) / np.linalg.norm(counts)
        assert found == pytest.approx(cosine, abs=1e-6)
    assert pair["data"][0]["score"] == pytest.approx(cosine, abs=1e-6)
    if pooled:
        assert cut.status_code == 200
    else:
        assert cut.json()["error"]["param"] == "truncate_prompt_tokens"
        assert "without the prompt that stands before it" in cut.json()["error"]["message"]


def test_a_cross_encoder_reads_its_texts_without_prompts(tmp_path: Path) -> None:
    played = engine()
    with openai_server(played, with_prompts(tmp_path), tokenizer=tokenizer()) as url:
        client = cohere.ClientV2(api_key="none", base_url=url)
        client.rerank(model="llm", query="ab", documents=["c"])
    assert halves(played.sent) == (b"ab", b"c")


def test_a_language_model_reads_them_in_its_template(tmp_path: Path) -> None:
    """Of what is cut it keeps what ends the question."""
    template = "{{ messages[0].content }}?{{ messages[1].content }}!{# 'query' 'document' #}"
    (checkpoint_folder(tmp_path) / "chat_template.jinja").write_text(template)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    played = engine(is_causal=True)
    with openai_server(played, tmp_path) as url:
        running, body = Running(url, played), {"query": "ab", "documents": ["cdef", "a"]}
        assert running.post("/rerank", body).status_code == 200
        assert running.post("/rerank", {**body, "truncate_prompt_tokens": 5}).status_code == 200
        no_room = running.post("/rerank", {**body, "truncate_prompt_tokens": 4}).json()["error"]
    found = [bytes(request.input_token_ids) for request in played.requests]
    assert found == [b"ab?cdef!", b"ab?a!", b"ab?c!", b"ab?a!"]
    assert {request.second_text_start for request in played.requests} == {0}
    assert no_room["message"] == "the first text of documents leaves no room for the second one"


def test_coheres_client_reranks_by_vectors_with_prompts(tmp_path: Path) -> None:
    played = engine(pooled="vectors", num_labels=0, model_outputs=["hidden_states"])
    with openai_server(played, with_prompts(tmp_path), embedding_pooling="mean") as url:
        answer = cohere.ClientV2(api_key="none", base_url=url).rerank(model="llm", query="ab", documents=["c", "dd"])
    assert [each.index for each in answer.results] == [1, 0]
    assert [bytes(request.input_token_ids) for request in played.requests] == [b"dd ab", b"ca c", b"ca dd"]


def test_what_is_too_long_is_refused_or_cut_at_its_end(tmp_path: Path) -> None:
    played = engine(max_seq_len=6, max_input_len=6)
    with openai_server(played, checkpoint_folder(tmp_path), tokenizer=tokenizer()) as url:
        running = Running(url, played)
        body = {"query": "ab", "documents": ["cdaba"]}
        error = running.post("/rerank", body).json()["error"]
        assert (error["param"], error["code"]) == ("documents", "context_length_exceeded")
        assert running.post("/rerank", {**body, "truncate_prompt_tokens": -1}).status_code == 200
        assert halves(played.sent) == (b"ab", b"cdaa"), "the last token ends a text for an encoder, and stays"
        assert running.post("/rerank", {**body, "truncate_prompt_tokens": 4}).status_code == 200
        assert halves(played.sent) == (b"ab", b"ca")
        no_room = running.post("/rerank", {**body, "truncate_prompt_tokens": 2}).json()["error"]
        assert no_room["message"] == "the first text of documents leaves no room for the second one"


@pytest.mark.parametrize(
    ("path", "body", "param", "sentence"),
    [
        ("/rerank", {"documents": ["a"]}, "query", "Missing required parameter: 'query'."),
        ("/rerank", {"query": "", "documents": ["a"]}, "query", "query is empty"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents is empty"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents", "documents[1] is empty"),
        ("/rerank", {"query": "a", "documents": ["b"] * 1025}, "documents", "1025 entries, more than 1024"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "at least 1"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc", "truncate_"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank": 1}, "rank", "Unrecognized request argument"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2", "2 entries and text_2 1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "text_2 is empty"),
    ],
)
def test_refusals(scoring: Running, path: str, body: dict[str, Any], param: str, sentence: str) -> None:
    response = scoring.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert sentence in error["message"]


def test_a_long_question_beside_many_documents_is_refused_before_it_is_read(
    scoring: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_module, "MAX_CHARS", 9)
    error = scoring.post("/rerank", {"query": "abcd", "documents": ["a", "b"]}).json()["error"]
    assert error["message"] == "all pairs of texts have 10 characters, more than 9"


def test_prompts_count_among_the_characters_of_all_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = engine(pooled="vectors", num_labels=0, model_outputs=["hidden_states"])
    body = {"query": "abcd", "documents": ["a", "b"]}
    with openai_server(played, with_prompts(tmp_path), embedding_pooling="mean") as url:
        monkeypatch.setattr(scoring_module, "MAX_CHARS", 10 + 12)
        assert Running(url, played).post("/rerank", body).status_code == 200
        monkeypatch.setattr(scoring_module, "MAX_CHARS", 10 + 11)
        error = Running(url, played).post("/rerank", body).json()["error"]
    assert error["message"] == "all pairs of texts have 22 characters, more than 21"


def test_several_scores_of_a_pair_are_no_answer(tmp_path: Path) -> None:
    played = engine(num_labels=3)
    with openai_server(played, checkpoint_folder(tmp_path), tokenizer=tokenizer()) as url:
        error = Running(url, played).post("/rerank", {"query": "a", "documents": ["b"]}).json()["error"]
    assert error["message"].startswith("this model gives 3 scores of a pair")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
    ],
)
def test_a_cross_encoders_scores_are_what_its_checkpoint_says(tmp_path: Path, config: object, expected: str) -> None:
    assert find_activation(tmp_path) == "sigmoid"
    folder = checkpoint_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    assert find_activation(folder) == expected
    played = engine()
    with openai_server(played, folder, tokenizer=tokenizer()) as url:
        (found,) = Running(url, played).post("/score", {"text_1": "ab", "text_2": "c"}).json()["data"]
    score = likeness(b"ab", b"c")
    assert found["score"] == pytest.approx(score if expected == "identity" else sigmoid(score))


def test_another_function_of_scores_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}'
    )
    with pytest.raises(ConfigurationError, match="asks for Tanh of scores; Sigmoid or Identity is computed here"):
        find_activation(tmp_path)
