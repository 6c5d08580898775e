"""Bodies of requests for a message, field by field, and the events of a stream."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai_server import CLIENT, PlayedEngine, Running, checkpoint_folder, openai_server, say

from inflight.result import Response

BODY: dict[str, Any] = {"model": "llm", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/messages"
CALL = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
NO_SCHEMA = {"type": "json_schema", "schema": {"type": 1}}
TOOL = {"name": "ping", "input_schema": {"type": "object"}}


def said_by(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"messages": []}, "messages is empty"),
        ({"max_tokens": None}, "max_tokens"),
        ({"wrong": 1}, "wrong"),
        ({"temperature": 1.5}, "temperature must be between 0 and 1"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"stop_sequences": [""]}, "stop_sequences may have"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens must be at least 1024"),
        ({"container": "c"}, "container is not supported: this engine runs no code"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses_20250919"),
        ({"tools": [{"type": "web_search_20250305", "name": "web"}]}, r"tools\[0\].type is not supported: web_search"),
        ({"tools": [{"name": "ping"}]}, "input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice of type tool needs a name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        (said_by({"type": "image", "source": {}}), r"messages\[0\].content\[0\].source.type"),
        (said_by({"type": "image", "source": {"type": "url", "url": "http://x"}}), "this server fetches nothing"),
        (said_by({"type": "image", "source": {"type": "base64", "data": "AA=="}}), "this model reads text alone"),
        (said_by({"type": "document"}), r"messages\[0\].content\[0\].type is not supported: document is none"),
        (said_by({"type": "text"}), "text"),
        (said_by({"type": ["text"]}), r"messages\[0\].content\[0\].type is not supported: \['text'\] is none of text"),
        (said_by(CALL), "tool_use is none of text, image, tool_result"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "only the service that has encrypted thinking can read it",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
                ]
            },
            "send their results as tool_result blocks",
        ),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "maximum context length"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}},
            "the guide has a keyword that names no type of JSON",
        ),
    ],
)
def test_what_is_refused(thinking: Running, body: dict[str, Any], sentence: str) -> None:
    response = thinking.post(PATH, {**BODY, **body})
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert re.search(sentence, error["error"]["message"]), error


def test_turns_of_one_role_are_one(thinking: Running) -> None:
    turns = [
        *({"role": "user", "content": text} for text in ("a", "b")),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
    ]
    assert thinking.post(PATH, {**BODY, "messages": turns}).status_code == 200
    prompt = bytes(thinking.engine.sent.input_token_ids).decode()
    assert prompt == "user: a\nb\nassistant: c\nuser: d\ne\nassistant: "


def test_turns_of_one_role_take_no_longer_together_than_one(thinking: Running) -> None:
    """To put each behind all before it would take minutes, and the length of the prompt is checked later."""
    turns = [{"role": "user", "content": "a" * 8_000_000}, *({"role": "user", "content": "b"} for _ in range(200_000))]
    response = thinking.post(PATH, {**BODY, "messages": turns})
    assert response.status_code == 413 and "max_text_bytes" in response.text


def test_what_agents_send_besides(thinking: Running) -> None:
    """As Claude Code does: marks for the cache, edits of thoughts, an effort, and a query."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {
        **BODY,
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "be brief", **mark}],
        "tools": [{**TOOL, **mark, "type": "custom", "eager_input_streaming": True}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": "x"},
        "temperature": 1,
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "none"}
    response = thinking.post(f"{PATH}?beta=true", body, headers=headers)
    assert response.status_code == 200, response.text
    request = thinking.engine.sent
    assert request.max_tokens == 512 - len(request.input_token_ids)


def test_events_are_named_and_in_order(thinking: Running) -> None:
    call = '<tool_call>{"name": "ping", "arguments": {"a": 1}}</tool_call>'
    thinking.engine.script = say("<think>Hm</think>Yes" + call)
    body = {**BODY, "max_tokens": 2000, "stream": True, "tools": [TOOL], "thinking": {"type": "adaptive"}}
    response = thinking.post(PATH, body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    found: list[str] = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        kind = event.get("delta", {}).get("type") or event.get("content_block", {}).get("type")
        place = [str(event["index"])] if "index" in event else []
        shown = " ".join([event["type"].removeprefix("content_block_"), *place, *([kind] if kind else [])])
        if found[-1:] != [shown]:
            found.append(shown)
    assert found == [
        "message_start",
        "ping",
        *("start 0 thinking", "delta 0 thinking_delta", "stop 0"),
        *("start 1 text", "delta 1 text_delta", "stop 1"),
        *("start 2 tool_use", "delta 2 input_json_delta", "stop 2"),
        "message_delta",
        "message_stop",
    ]


def test_an_answer_without_text_is_the_same_whole_and_as_events(running: Running) -> None:
    running.engine.script = say("")
    assert running.post(PATH, BODY).json()["content"] == [{"type": "text", "text": ""}]
    text = running.post(PATH, {**BODY, "stream": True}).text
    assert text.count("event: content_block_start") == 1 and "content_block_delta" not in text


def test_a_stream_that_fails_ends_with_an_error(running: Running) -> None:
    """Behind text that has come on the short way, on which nearly every token goes."""
    running.engine.script = say("Hel", ends=False)
    with CLIENT.stream("POST", f"{running.url}{PATH}", json={**BODY, "stream": True}) as response:
        lines, text = response.iter_lines(), ""
        while '"text":"Hel"' not in text:
            text += next(lines) + "\n"
        request_id = running.engine.sent.request_id
        running.engine.push(Response(request_id=request_id, error_msg="the ranks died", error_code="UNAVAILABLE"))
        text += "\n".join(lines)
    begin, _, error = text.rpartition("event: error\ndata: ")
    deltas = [json.loads(line[6:])["delta"] for line in begin.split("\n") if "text_delta" in line]
    assert "".join(delta["text"] for delta in deltas) == "Hel"
    assert json.loads(error) == {"type": "error", "error": {"type": "overloaded_error", "message": "the ranks died"}}


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/batches/a/results", 404, "not_found_error"),
        ("POST", "/v1/messages/", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ],
)
def test_errors_at_every_path_have_anthropics_form(
    running: Running, method: str, path: str, status: int, kind: str
) -> None:
    response = CLIENT.request(method, running.url + path)
    assert response.status_code == status
    body = response.json()
    assert (body["type"], sorted(body), body["error"]["type"]) == ("error", ["error", "type"], kind)


def test_a_key_may_come_in_anthropics_header(tmp_path: Path) -> None:
    key = "a-key-of-the-operator"
    (tmp_path / "keys").write_text(key)
    engine = PlayedEngine()
    with openai_server(engine, checkpoint_folder(tmp_path / "c"), api_key_file=str(tmp_path / "keys")) as url:
        running = Running(url, engine)
        for others in ({}, {"authorization": "Basic eDp5"}):
            assert running.post(PATH, BODY, headers={"x-api-key": key, **others}).status_code == 200
        for headers in ({}, {"x-api-key": "another-one-entirely"}):
            response = running.post(PATH, BODY, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
