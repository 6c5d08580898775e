"""What clients are told who ask for text of a model that writes none."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from openai_server import CHAT, CHATS, CLIENT, COMPLETIONS, Running, checkpoint_folder, openai_server
from played_encoder import engine, tokenizer

from inflight_client import encoder_examples

MESSAGES = {"model": "llm", **CHAT}
ASKED: dict[str, dict[str, Any]] = {
    CHATS: CHAT,
    COMPLETIONS: {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {**MESSAGES, "max_tokens": 9},
    "/v1/messages/count_tokens": MESSAGES,
    "/api/chat": MESSAGES,
    "/api/generate": {"model": "llm", "prompt": "a"},
    "/tokenize": CHAT,
}
SERVING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/api/embed": {"model": "llm", "input": "a"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
}
VECTORS = {"pooled": "vectors", "num_labels": 0, "model_outputs": ["hidden_states"]}
KINDS: list[tuple[str, dict[str, Any], str, set[str]]] = [
    ("vectors", VECTORS, "an encoder", {*SERVING}),
    ("scores", {}, "a cross-encoder", {*SERVING}),
    ("labels", {"num_labels": 3}, "an encoder with scores for 3 labels", {"/v1/embeddings", "/api/embed"}),
]
"""Limits of an engine, what it is, and the paths that serve it."""


def sentence_of(answer: Any) -> str:
    """In whatever form the error is."""
    error = answer["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(("limits", "what", "paths"), [each[1:] for each in KINDS], ids=[each[0] for each in KINDS])
@pytest.mark.parametrize("has_template", [True, False], ids=["template", "no-template"])
def test_who_asks_for_text_is_told_what_the_model_is_and_which_paths_serve_it(
    tmp_path: Path, limits: dict[str, Any], what: str, paths: set[str], has_template: bool
) -> None:
    folder = checkpoint_folder(tmp_path)
    if not has_template:
        (folder / "chat_template.jinja").unlink()
    played = engine(**limits)
    with openai_server(played, folder, tokenizer=tokenizer(), embedding_pooling="mean") as url:
        running = Running(url, played)
        said = {path: running.post(path, body) for path, body in ASKED.items()}
        served = {path for path, body in SERVING.items() if running.post(path, body).status_code == 200}
        assert running.post("/tokenize", {"prompt": "ab"}).json()["count"] == 2, "its texts have tokens"
    assert {response.status_code for response in said.values()} == {400}
    (sentence,) = {sentence_of(response.json()) for response in said.values()}
    assert sentence.startswith(f"this model is {what}, which writes no text: ")
    assert {*re.findall(r"/[/\w]+", sentence)} == served == paths


@pytest.mark.parametrize("pooled", [*encoder_examples.OF_OPENAI])
def test_the_example_of_the_command_line_is_answered(tmp_path: Path, pooled: str) -> None:
    played = engine(**(VECTORS if pooled == "vectors" else {}))
    with openai_server(played, checkpoint_folder(tmp_path), tokenizer=tokenizer(), embedding_pooling="mean") as url:
        command = encoder_examples.of_openai(url.removeprefix("http://"), "llm", pooled, has_keys=False)
        _, where, *_, body = shlex.split(command)
        response = CLIENT.post(where, content=body)
    assert response.status_code == 200, response.text


def test_a_chat_without_a_template_is_sent_to_completions(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path)
    (folder / "chat_template.jinja").unlink()
    played = engine(pooled="")
    with openai_server(played, folder) as url:
        error = Running(url, played).post(CHATS, CHAT).json()["error"]
    assert error["message"] == "this checkpoint has no chat template: use /v1/completions"
