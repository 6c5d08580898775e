"""Every refusal: its status, and the words and codes that clients search for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai_server import CHAT, CHATS, CLIENT, COMPLETIONS, PlayedEngine, Running, checkpoint_folder, openai_server
from wrong_values import WRONG_SAMPLING

from inflight.errors import EngineUnavailable, InvalidRequest, QueueFull
from inflight.http.dialects.openai import fields
from inflight.http.dialects.openai.fields import ACCEPTED_UNUSED, LIMITS, REFUSED, ChatBody, CompletionBody
from inflight.result import Response
from inflight.text.stop_strings import StopStrings

COMPLETION: dict[str, Any] = {"prompt": "hi"}

OF_ENGINE = [
    (COMPLETIONS, {**COMPLETION, wrong.field: wrong.value}, 400, wrong.field, wrong.sentence, None)
    for wrong in WRONG_SAMPLING
    if wrong.is_json and wrong.field in CompletionBody.__struct_fields__ and wrong.field not in {**LIMITS, **REFUSED}
]
TABLE = [
    *OF_ENGINE,
    # path, body, status, param, a part of the message, code
    (COMPLETIONS, {}, 400, "prompt", "Missing required parameter: 'prompt'", "missing_required_parameter"),
    (COMPLETIONS, {**COMPLETION, "wrong": 1}, 400, "wrong", "Unrecognized request argument", "unknown_parameter"),
    (COMPLETIONS, {**COMPLETION, "max_tokens": "7"}, 400, "max_tokens", "Expected `int", "invalid_type"),
    (COMPLETIONS, {**COMPLETION, "logprobs": "all"}, 400, "logprobs", "Expected `int", "invalid_type"),
    (COMPLETIONS, {**COMPLETION, "logprobs": 6}, 400, "logprobs", "between 0 and 5", None),
    (COMPLETIONS, {**COMPLETION, "max_tokens": 0}, 400, "max_tokens", "at least 1", None),
    (
        COMPLETIONS,
        {**COMPLETION, "max_tokens": 600},
        400,
        "max_tokens",
        "maximum context length",
        "context_length_exceeded",
    ),
    (COMPLETIONS, {"prompt": [1] * 600}, 400, "prompt", "maximum context length", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "x" * 5000}, 400, "prompt", "maximum context length", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "empty", None),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "empty", None),
    (COMPLETIONS, {"prompt": [[]]}, 400, "prompt", "empty", None),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt", "must be a text", None),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", "outside the vocabulary", None),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, 400, "prompt", "more than 1024", None),
    (COMPLETIONS, {**COMPLETION, "n": 0}, 400, "n", "between 1 and 8", None),
    (COMPLETIONS, {**COMPLETION, "n": 16384}, 400, "n", "between 1 and 8", None),
    (COMPLETIONS, {**COMPLETION, "temperature": -1}, 400, "temperature", "between 0 and 2", None),
    (COMPLETIONS, {**COMPLETION, "temperature": 2.1}, 400, "temperature", "between 0 and 2, got 2.1", None),
    (COMPLETIONS, {**COMPLETION, "frequency_penalty": 3}, 400, "frequency_penalty", "between -2 and 2", None),
    (COMPLETIONS, {**COMPLETION, "presence_penalty": -2.1}, 400, "presence_penalty", "between -2 and 2", None),
    (COMPLETIONS, {**COMPLETION, "logit_bias": {"5": 101}}, 400, "logit_bias", "got 101.0 for token 5", None),
    (COMPLETIONS, {**COMPLETION, "metadata": {"a": 1}}, 400, "metadata", "Expected `str`", "invalid_type"),
    (COMPLETIONS, {**COMPLETION, "metadata": {"a": "b" * 513}}, 400, "metadata", "values of 512", None),
    (COMPLETIONS, {**COMPLETION, "top_p": 0}, 400, "top_p", "above 0", None),
    (COMPLETIONS, {**COMPLETION, "seed": 2**65}, 400, "seed", "", None),
    (COMPLETIONS, {**COMPLETION, "stop": ["a"] * 5}, 400, "stop", "more than 4", None),
    (COMPLETIONS, {**COMPLETION, "stop": ""}, 400, "stop", "characters", None),
    (COMPLETIONS, {**COMPLETION, "stop": ["a", ""]}, 400, "stop", "characters", None),
    (COMPLETIONS, {**COMPLETION, "bad_words": [""]}, 400, "bad_words", "must hold no empty text", None),
    (COMPLETIONS, {**COMPLETION, "bad_words": ["a", ""]}, 400, "bad_words", "must hold no empty text", None),
    (COMPLETIONS, {**COMPLETION, "logit_bias": {"cat": 1}}, 400, "logit_bias", "token ids", None),
    (COMPLETIONS, {**COMPLETION, "logit_bias": {"999": 1}}, 400, "logit_bias", "outside", None),
    (COMPLETIONS, {**COMPLETION, "stop_token_ids": [999]}, 400, "stop_token_ids", "token ids", None),
    (COMPLETIONS, {**COMPLETION, "allowed_token_ids": []}, 400, "allowed_token_ids", "at least one", None),
    (COMPLETIONS, {**COMPLETION, "min_tokens": 99}, 400, "min_tokens", "min_tokens", None),
    (COMPLETIONS, {**COMPLETION, "priority": 2**40}, 400, "priority", "between", None),
    (COMPLETIONS, {**COMPLETION, "cache_salt": ""}, 400, "cache_salt", "bytes", None),
    (COMPLETIONS, {**COMPLETION, "request_id": "a b"}, 400, "request_id", "printable", None),
    (COMPLETIONS, {**COMPLETION, "truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens", "-1", None),
    (COMPLETIONS, {**COMPLETION, "allotted_time_ms": 0}, 400, "allotted_time_ms", "must be between 1 and", None),
    (COMPLETIONS, {**COMPLETION, "allotted_time_ms": 2**31}, 400, "allotted_time_ms", "between 1 and 2147483647", None),
    (COMPLETIONS, {**COMPLETION, "allotted_time_ms": 2**70}, 400, "allotted_time_ms", "between 1 and 2147483647", None),
    (COMPLETIONS, {**COMPLETION, "stream_options": {}}, 400, "stream_options", "stream is true", None),
    (
        COMPLETIONS,
        {**COMPLETION, "stream": True, "stream_options": {"continuous_usage_stats": True}},
        400,
        "stream_options.continuous_usage_stats",
        "once",
        "unsupported_parameter",
    ),
    (COMPLETIONS, {**COMPLETION, "stream": True, "echo": True, "logprobs": 1}, 400, "stream", "leave out", None),
    (COMPLETIONS, {**COMPLETION, "best_of": 3}, 400, "best_of", "set n", "unsupported_parameter"),
    (
        COMPLETIONS,
        {**COMPLETION, "guided_regex": "a", "guided_choice": ["a"]},
        400,
        "guided_choice",
        "two grammars",
        None,
    ),
    (COMPLETIONS, {**COMPLETION, "guided_choice": []}, 400, "guided_choice", "not empty", None),
    (COMPLETIONS, {**COMPLETION, "guided_regex": "a", "ignore_eos": True}, 400, "guided_regex", "end token", None),
    (COMPLETIONS, {**COMPLETION, "guided_regex": "a" * 9000}, 400, "guided_regex", "8192", None),
    (
        COMPLETIONS,
        {**COMPLETION, "structured_outputs": {"json": {}, "regex": "a"}},
        400,
        "structured_outputs.regex",
        "two",
        None,
    ),
    (
        COMPLETIONS,
        {**COMPLETION, "structured_outputs": {"whitespace_pattern": " "}},
        400,
        "structured_outputs.whitespace_pattern",
        "one class of white space",
        "unsupported_parameter",
    ),
    (
        COMPLETIONS,
        {**COMPLETION, "guided_json_object": True, "guided_decoding_backend": "outlines"},
        400,
        "guided_decoding_backend",
        "llguidance",
        "unsupported_parameter",
    ),
    (
        COMPLETIONS,
        {**COMPLETION, "structured_outputs": {"json": {}, "backend": "xgrammar"}},
        400,
        "structured_outputs.backend",
        "llguidance",
        "unsupported_parameter",
    ),
    (COMPLETIONS, {**COMPLETION, "guided_white_space": "free"}, 400, "guided_white_space", "no field asks", None),
    (
        COMPLETIONS,
        {**COMPLETION, "guided_json_object": True, "guided_white_space": "any"},
        400,
        "guided_white_space",
        "one of dumps, compact, free",
        None,
    ),
    (
        COMPLETIONS,
        {
            **COMPLETION,
            "structured_outputs": {"json_object": True, "disable_any_whitespace": True},
            "guided_white_space": "free",
        },
        400,
        "guided_white_space",
        "give one of them",
        None,
    ),
    (COMPLETIONS, {**COMPLETION, "model": "gpt-5"}, 404, "model", "does not exist", "model_not_found"),
    (COMPLETIONS, {**COMPLETION, "model": "../../etc/passwd"}, 404, "model", "does not exist", "model_not_found"),
    (CHATS, {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages", "max", "context_length_exceeded"),
    (CHATS, {**CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens", "at least 1, got 0", None),
    (CHATS, {"messages": []}, 400, "messages", "empty", None),
    (CHATS, {"messages": "hi"}, 400, "messages", "Expected `array`", "invalid_type"),
    (CHATS, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing", None),
    (CHATS, {"messages": [{"role": "robot", "content": "a"}]}, 400, "messages[0].role", "one of", None),
    (CHATS, {"messages": [{"role": "user", "content": 7}]}, 400, "messages[0].content", "type", "invalid_type"),
    (
        CHATS,
        {"messages": [{"role": "user", "content": "a", "audio": 1}]},
        400,
        "messages[0]",
        "field",
        "unknown_parameter",
    ),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        400,
        "messages[0].content[0].image_url",
        "fetches nothing",
        "unsupported_parameter",
    ),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,AA=="}}]}]},
        400,
        "messages",
        "this model reads text alone",
        "unsupported_parameter",
    ),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        400,
        "messages[0].content[0]",
        "must be text, or an image_url",
        None,
    ),
    (CHATS, {**CHAT, "top_logprobs": 3}, 400, "top_logprobs", "logprobs", None),
    (CHATS, {**CHAT, "logprobs": True, "top_logprobs": 25}, 400, "top_logprobs", "20", None),
    (CHATS, {**CHAT, "chat_template": "{{ 1 }}"}, 400, "chat_template", "checkpoint alone", "unsupported_parameter"),
    (CHATS, {**CHAT, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs", "mood", None),
    (CHATS, {**CHAT, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "allows", None),
    (
        CHATS,
        {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message",
        "false",
        None,
    ),
    (CHATS, {**CHAT, "response_format": {"type": "yaml"}}, 400, "response_format", "json_schema", None),
    (
        CHATS,
        {**CHAT, "response_format": {"type": "structural_tag", "structures": [{"begin": "<f>"}]}},
        400,
        "response_format",
        "missing required field",
        None,
    ),
    (CHATS, {**CHAT, "response_format": {"type": "json_schema"}}, 400, "response_format", "schema", None),
    (
        CHATS,
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        400,
        "response_format",
        "schema",
        None,
    ),
    (
        CHATS,
        {**CHAT, "max_completion_tokens": 600, "max_tokens": 2},
        400,
        "max_completion_tokens",
        "context",
        "context_length_exceeded",
    ),
    ("/tokenize", {}, 400, "prompt", "one of the two", None),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens", "token ids", None),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/"}, 403, None, "operator", None),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "words", "code"), TABLE)
def test_a_wrong_body_is_refused_in_openais_form(
    running: Running, path: str, body: dict[str, Any], status: int, param: str | None, words: str, code: str | None
) -> None:
    running.engine.requests.clear()
    response = running.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert running.engine.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "\\ud800"}', b"null"])
def test_what_is_no_json_object_is_refused(running: Running, body: bytes) -> None:
    response = running.post(COMPLETIONS, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.text) < 1000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {**COMPLETION, "guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        (CHATS, {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object"}}}, "text.format"),
        (CHATS, {**CHAT, "user": "me"}, None),
    ],
)
def test_what_the_ranks_refuse_names_the_field(
    running: Running, path: str, body: dict[str, Any], param: str | None
) -> None:
    sentence = "the grammar takes more than 5 s to compile"
    running.engine.script = lambda request: [Response.of_error(request.request_id, InvalidRequest(sentence))]
    response = running.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert response.json()["error"]["message"] == sentence


def test_a_refusal_repeats_little_of_what_was_sent(running: Running) -> None:
    response = running.post(COMPLETIONS, {**COMPLETION, "y" * 100_000: 1})
    assert response.status_code == 400
    assert len(response.text) < 1500


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_each_refused_field_is_refused_by_name_and_null_is_not(running: Running, name: str) -> None:
    chat = name in ChatBody.__struct_fields__
    path, body = (CHATS, CHAT) if chat else (COMPLETIONS, COMPLETION)
    assert running.post(path, {**body, name: None}).status_code == 200
    for harmless in REFUSED[name][0]:
        assert running.post(path, {**body, name: harmless}).status_code == 200, (name, harmless)
    error = running.post(path, {**body, name: _some_value(name)}).json()["error"]
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter", error


def _some_value(name: str) -> Any:
    """Of the field's type, and asking for something."""
    values: tuple[Any, ...] = ("x", 7, True, False, 0.7, ["x"], {"x": 1}, [{"x": 1}])
    for value in values:
        if value in REFUSED[name][0]:
            continue
        kind, base = (ChatBody, CHAT) if name in ChatBody.__struct_fields__ else (CompletionBody, COMPLETION)
        try:
            msgspec.convert({**base, name: value}, kind)
        except msgspec.ValidationError:
            continue
        return value
    raise AssertionError(name)


def test_every_field_is_honoured_or_refused_or_known_to_be_unused() -> None:
    """Honoured fields are read somewhere else than where they are declared and refused."""
    folder = Path(fields.__file__).parent
    code = "\n".join(path.read_text() for path in folder.glob("*.py") if path.name != "fields.py")
    code += "body.stream_options body.best_of"  # checked in fields.py
    names = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    unread = [n for n in names if n not in REFUSED and n not in ACCEPTED_UNUSED and f"body.{n}" not in code]
    assert unread == []


def test_a_full_engine_asks_to_retry(running: Running) -> None:
    running.engine.refusal = QueueFull()
    response = running.post(COMPLETIONS, COMPLETION)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"] == "Exceeds maximum queue size"


def test_an_engine_that_is_away_asks_to_retry(running: Running) -> None:
    running.engine.refusal = EngineUnavailable("the engine is not available: its ranks are dead")
    assert running.post(CHATS, {**CHAT, "stream": True}).status_code == 503


def test_an_unexpected_failure_says_nothing_of_itself(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    running.engine.refusal = RuntimeError("the prompt was SECRET")
    response = running.post(COMPLETIONS, COMPLETION)
    assert response.status_code == 500
    assert "SECRET" not in response.text + caplog.text


def test_health_follows_the_engine(running: Running) -> None:
    for path in ("/health", "/health/ready"):
        running.engine.ready = True
        assert (running.get(path).status_code, running.get(path).content) == (200, b"")
        running.engine.ready = False
        assert running.get(path).status_code == 503


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", COMPLETIONS, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/", 405),
        ("DELETE", "/v1/nothing", 404),
        ("GET", "/v1/models/x", 404),
        ("GET", "/v1/responses/input_tokens", 405),
        ("POST", "/v1/responses/compact", 404),
    ],
)
def test_paths_and_methods(running: Running, method: str, path: str, status: int) -> None:
    response = CLIENT.request(method, running.url + path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_what_prompts_share_is_made_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 9 KB with a thousand prompts and four stop strings took a gigabyte."""
    made: list[list[str]] = []

    def make(stop_strings: list[str]) -> StopStrings:
        made.append(stop_strings)
        return StopStrings(stop_strings)

    monkeypatch.setattr("inflight.asking.served.StopStrings", make)
    body = {"prompt": ["a"] * 20, "stop": "x", "bad_words": ["y"], "allowed_token_ids": [72], "logit_bias": {"72": 1}}
    assert running.post(COMPLETIONS, body).status_code == 200
    assert made == [["x"]]
    requests = running.engine.requests[-20:]
    for make_shared in (lambda each: each.bad_words, lambda each: each.sampling_config.embedding_bias):
        assert len({id(make_shared(each)) for each in requests}) == 1


@pytest.mark.parametrize(
    "options",
    [{"allowed_token_ids": [72]}, {"bad_words": ["a", "b"]}, {"logit_bias": {str(token): 1 for token in range(5)}}],
)
def test_what_many_prompts_bring_to_the_engine_is_bounded(
    running: Running, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Each has a copy of its own: a body of 13 KB kept all short requests waiting for 20 s."""
    monkeypatch.setattr("inflight.asking.served.MAX_COPIED_BYTES", 5200)
    assert running.post(COMPLETIONS, {"prompt": ["a"] * 4, **options}).status_code == 200
    response = running.post(COMPLETIONS, {"prompt": ["a"] * 6, **options})
    assert response.status_code == 400
    assert "prompt may have" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["", "nowhere", "a" * 5000, "a\0b"])
def test_an_adapter_in_no_folder_is_refused(tmp_path: Path, path: str) -> None:
    with openai_server(PlayedEngine(), checkpoint_folder(tmp_path), allow_lora_updates=True) as url:
        response = CLIENT.post(url + "/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": path})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "lora_path")
