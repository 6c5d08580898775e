"""The real `ollama` package against the server, and bodies that it would not send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from openai_server import TEXT, Running, say

MESSAGES: Any = [{"role": "user", "content": "hi"}]
PING: Any = {
    "type": "function",
    "function": {"name": "ping", "parameters": {"type": "object", "properties": {"a": {}}}},
}
CALL = '<tool_call>{"name": "ping", "arguments": {"a": 1}}</tool_call>'
BODY: dict[str, Any] = {"model": "llm", "messages": MESSAGES, "stream": False}


@pytest.fixture(scope="module")
def client(thinking_server: Running) -> Iterator[ollama.Client]:
    client = ollama.Client(host=thinking_server.url, trust_env=False)
    yield client
    client._client.close()


def prompt_of(running: Running) -> str:
    return bytes(running.engine.sent.input_token_ids).decode()


def test_a_chat_and_its_stream(thinking: Running, client: ollama.Client) -> None:
    options = {"temperature": 0.5, "num_ctx": 4096, "seed": 7, "repeat_penalty": 1.1, "num_predict": -1}
    whole = client.chat("llm:latest", MESSAGES, options=options, keep_alive="5m")
    assert (whole.model, whole.message.content, whole.message.role) == ("llm", TEXT, "assistant")
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "stop", len(TEXT) + 1)
    assert whole.prompt_eval_count == len(prompt_of(thinking)) and prompt_of(thinking) == "user: hi\nassistant: "
    assert (whole.total_duration or 0) >= (whole.prompt_eval_duration or 0) + (whole.eval_duration or 0) - 2
    sampling = thinking.engine.sent.sampling_config
    assert (sampling.temperature, sampling.seed, sampling.repetition_penalty) == (0.5, 7, 1.1)
    pieces = list(client.chat("llm", MESSAGES, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == TEXT
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (pieces[-1].done_reason, pieces[-1].eval_count) == ("stop", len(TEXT) + 1)


def test_a_text_is_a_message_unless_it_is_raw(running: Running) -> None:
    client = ollama.Client(host=running.url, trust_env=False)
    assert client.generate("llm", "hi", system="be brief").response == TEXT
    assert prompt_of(running) == "system: be brief\nuser: hi\nassistant: "
    pieces = list(client.generate("llm", "hi", raw=True, stream=True, options={"num_predict": 4}))
    assert "".join(piece.response or "" for piece in pieces) == TEXT[:4] and pieces[-1].done_reason == "length"
    assert prompt_of(running) == "hi" and len(running.engine.sent.input_token_ids) == 2


def test_thoughts_stand_apart_and_may_be_left_out(thinking: Running, client: ollama.Client) -> None:
    thinking.engine.script = say("<think>\nHm.\n</think>\n\nYes.")
    for think, thought in ((None, "Hm."), (True, "Hm."), (False, None)):
        whole = client.chat("llm", MESSAGES, think=think).message
        pieces = [piece.message for piece in client.chat("llm", MESSAGES, think=think, stream=True)]
        joined = ["".join(getattr(piece, name) or "" for piece in pieces) for name in ("thinking", "content")]
        assert [whole.thinking or "", whole.content] == joined
        assert (joined[0].strip() or None, joined[1].strip()) == (thought, "Yes.")


def test_calls_and_their_results(thinking: Running, client: ollama.Client) -> None:
    thinking.engine.script = say("Two:\n" + CALL + "\n" + CALL.replace("1", "2"))
    whole = client.chat("llm", MESSAGES, tools=[PING]).message
    streamed = [piece.message for piece in client.chat("llm", MESSAGES, tools=[PING], stream=True)]
    expected = [("ping", {"a": 1}), ("ping", {"a": 2})]
    for calls in (whole.tool_calls, [call for piece in streamed for call in piece.tool_calls or ()]):
        assert [(call.function.name, call.function.arguments) for call in calls or ()] == expected
    thinking.engine.script = say()
    results = [{"role": "tool", "tool_name": "ping", "content": f"got {number}"} for number in range(2)]
    client.chat("llm", [*MESSAGES, whole, *results])
    assert prompt_of(thinking) == (
        f'user: hi\nassistant: ping{{"a": 1}}ping{{"a": 2}}{whole.content}\ntool: got 0\ntool: got 1\nassistant: '
    )


def test_a_call_that_was_cut_is_left_out(thinking: Running, client: ollama.Client) -> None:
    thinking.engine.script = say(CALL)
    answer = client.chat("llm", MESSAGES, tools=[PING], options={"num_predict": len(CALL) - 20})
    assert (answer.message.tool_calls, answer.done_reason) == (None, "length")


def test_a_form_is_a_grammar(thinking: Running, client: ollama.Client) -> None:
    client.chat("llm", MESSAGES, format={"type": "object", "properties": {"a": {"type": "integer"}}})
    guide = thinking.engine.sent.guided_decoding_params
    assert guide is not None and '"integer"' in guide.guide
    client.chat("llm", MESSAGES, format="json")
    assert thinking.engine.sent.guided_decoding_params is not None


def test_log_probabilities(running: Running) -> None:
    client = ollama.Client(host=running.url, trust_env=False)
    whole = client.generate("llm", "hi", logprobs=True, top_logprobs=2).logprobs or []
    pieces = client.generate("llm", "hi", logprobs=True, top_logprobs=2, stream=True)
    streamed = [entry for piece in pieces for entry in piece.logprobs or ()]
    assert whole == streamed and [entry.token for entry in whole][:3] == ["H", "e", "l"]
    assert all(len(entry.top_logprobs or ()) == 2 for entry in whole)


def test_models_and_orders_to_load_one(thinking: Running, client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["llm"]
    assert client.generate("llm").done_reason == "load" == client.chat("llm", []).done_reason


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"model": "other:latest"}, 404, "model 'other:latest' not found"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, 400, "this model reads text alone"),
        ({"messages": [{"role": "user", "content": "a", "images": [1]}]}, 400, "messages[0].images must hold files"),
        ({"options": {"mirostat": 1}}, 400, "options.mirostat is not supported"),
        ({"options": {"wrong": 1}}, 400, "options: Object contains unknown field `wrong`"),
        ({"options": {"num_predict": 0}}, 400, "options.num_predict must be at least 1, or -1, got 0"),
        ({"options": {"temperature": -1}}, 400, "temperature"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, 400, "options.repeat_last_n is not supported"),
        ({"options": {"stop": [""]}}, 400, "options.stop may have"),
        ({"format": "xml"}, 400, "format must be json or a JSON schema"),
        ({"top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
        ({"tools": [{"type": "function"}]}, 400, "function"),
        ({"messages": [{"role": "alien", "content": "a"}]}, 400, "messages[0].role must be one of"),
    ],
)
def test_what_is_refused(thinking: Running, body: dict[str, Any], status: int, sentence: str) -> None:
    response = thinking.post("/api/chat", {**BODY, **body})
    assert response.status_code == status, response.text
    assert [*response.json()] == ["error"] and sentence in response.json()["error"]


def test_texts_ask_for_no_images_and_no_gaps(thinking: Running) -> None:
    for name, value in (("suffix", "b"), ("context", [1]), ("template", "x")):
        response = thinking.post("/api/generate", {"model": "llm", "prompt": "a", name: value})
        assert response.status_code == 400 and response.json()["error"].startswith(f"{name} is not supported")
    raw = thinking.post("/api/generate", {"model": "llm", "prompt": "a", "raw": True, "images": ["aGk="]})
    assert raw.status_code == 400 and raw.json()["error"].startswith("images is not supported: with raw true")


def test_a_stream_is_lines_of_json(running: Running) -> None:
    response = running.post("/api/chat", {**BODY, "stream": True})
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = response.text.split("\n")
    assert lines.pop() == "" and all(json.loads(line)["model"] == "llm" for line in lines)
