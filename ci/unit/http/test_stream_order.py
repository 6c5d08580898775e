"""A stream's bytes: which events come, in which order, and what each holds."""

from __future__ import annotations

import json

import pytest
from openai_server import CHATS, CLIENT, COMPLETIONS, TEXT, Running, result, say
from starlette.types import Message, Receive, Scope, Send

from inflight.http.dialects.openai.errors import in_openais_form
from inflight.http.endpoint import Endpoint
from inflight.http.metrics import ServerMetrics
from inflight.request import Request
from inflight.result import FinishReason, Response

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"messages": MESSAGES}
COMPLETION = {"prompt": "hi", "max_tokens": 64}


def test_the_bytes_of_a_chat(running: Running) -> None:
    response = running.post(CHATS, {**CHAT, "stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    first = json.loads(response.text.split("\n\n")[0][6:])
    head = f'{{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},'
    head += f'"model":"llm","system_fingerprint":"{first["system_fingerprint"]}","choices":['
    assert first["id"].startswith("chatcmpl-")
    assert response.text == "".join(
        f"data: {event}\n\n"
        for event in (
            head + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
            head + '{"index":0,"delta":{"content":"Hello, world"},"logprobs":null,"finish_reason":null}]}',
            head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
            head + '],"usage":{"prompt_tokens":20,"completion_tokens":13,"total_tokens":33,'
            '"prompt_tokens_details":{"cached_tokens":0}}}',
            "[DONE]",
        )
    )


def test_the_bytes_of_a_completion(running: Running) -> None:
    response = running.post(COMPLETIONS, {**COMPLETION, "stream": True})
    first = json.loads(response.text.split("\n\n")[0][6:])
    head = f'{{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},'
    head += f'"model":"llm","system_fingerprint":"{first["system_fingerprint"]}","choices":['
    assert first["id"].startswith("cmpl-")
    assert response.text == "".join(
        f"data: {event}\n\n"
        for event in (
            head + '{"index":0,"text":"Hello, world","logprobs":null,"finish_reason":null}]}',
            head + '{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
            "[DONE]",
        )
    )


def test_first_tokens_without_text_do_not_end_a_stream(running: Running) -> None:
    """A character of two tokens: the first has no text yet."""
    later: list[Response] = []

    def begin(request: Request) -> list[Response]:
        first, *rest = say("étude")(request)
        later.extend(rest)
        return [first]

    running.engine.script = begin
    body = {**COMPLETION, "stream": True}
    with CLIENT.stream("POST", f"{running.url}{COMPLETIONS}", json=body) as response:
        # Status and headers have come with the first token.
        running.engine.push(*later)
        frames = response.read().decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert "".join(json.loads(frame[6:])["choices"][0]["text"] for frame in frames[:-2]) == "étude"


async def test_an_answer_that_cannot_be_sent_is_counted() -> None:
    """As one whose error is found when its headers are out already."""

    async def write(scope: Scope, receive: Receive, send: Send) -> int:
        raise ZeroDivisionError

    async def refuse(message: Message) -> None:
        raise RuntimeError("the response has started")

    metrics = ServerMetrics()
    with pytest.raises(RuntimeError):
        await Endpoint("/x", {"GET": write}, metrics, in_openais_form)({"method": "GET"}, refuse, refuse)
    text = metrics.text({})
    assert b'inflight_openai_requests_total{path="/x",status="500"} 1.0' in text
    assert b'inflight_openai_requests_accepted_total{path="/x"} 1.0' in text


def test_no_usage_unless_it_is_asked_for(running: Running) -> None:
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert all("usage" not in event for event in running.events(CHATS, {**CHAT, **options})[:-1])


def test_choices_come_interleaved_and_each_has_one_role_and_one_end(running: Running) -> None:
    events = running.events(CHATS, {**CHAT, "n": 3})
    assert events.pop() == "[DONE]"
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"].get("role") for choice in choices[:3]] == ["assistant"] * 3
    assert [choice["index"] for choice in choices[:3]] == [0, 1, 2]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == TEXT
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1


def test_several_prompts_number_their_choices_on(running: Running) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "stream_options": {"include_usage": True}}
    *events, usage, done = running.events(COMPLETIONS, body)
    assert done == "[DONE]"
    assert {event["choices"][0]["index"] for event in events} == {0, 1, 2, 3}
    assert usage["choices"] == []
    counts = {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}
    assert usage["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


def test_a_completion_repeats_its_prompt_first(running: Running) -> None:
    events = running.events(COMPLETIONS, {**COMPLETION, "echo": True})
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["hi", TEXT, ""]


def test_the_usage_of_a_stream_is_that_of_the_whole_answer(running: Running) -> None:
    whole = running.post(CHATS, {**CHAT, "n": 2, "max_tokens": 5}).json()
    *_, usage, _ = running.events(CHATS, {**CHAT, "n": 2, "max_tokens": 5, "stream_options": {"include_usage": True}})
    assert whole["usage"] == usage["usage"]
    assert whole["object"] == "chat.completion"
    assert [choice["message"] for choice in whole["choices"]] == [{"role": "assistant", "content": "Hello"}] * 2
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 2


def test_an_error_before_the_first_token_has_a_status(running: Running) -> None:
    def fail(request: Request) -> list[Response]:
        return [
            Response(
                request_id=request.request_id,
                error_msg="the guide is no JSON schema",
                error_code="INVALID_ARGUMENT",
                outcome="rejected",
            )
        ]

    running.engine.script = fail
    response = running.post(CHATS, {**CHAT, "stream": True})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the guide is no JSON schema")


def test_an_error_behind_tokens_is_an_event_and_done_is_the_last(running: Running) -> None:
    def fail(request: Request) -> list[Response]:
        return [
            result(request, [72]),
            Response(
                request_id=request.request_id,
                error_msg="the engine's ranks died while the request was in flight",
                error_code="UNAVAILABLE",
                outcome="unavailable",
            ),
        ]

    def fail_later(request: Request) -> list[Response]:
        first, last = fail(request)
        later.append(last)
        return [first]

    later: list[Response] = []
    running.engine.script = fail_later
    with CLIENT.stream("POST", f"{running.url}{CHATS}", json={**CHAT, "stream": True}) as response:
        lines = response.iter_lines()
        seen = [line for line in (next(lines) for _ in range(4)) if line]
        running.engine.push(*later)
        seen += [line for line in lines if line]
    assert json.loads(seen[1][6:])["choices"][0]["delta"] == {"content": "H"}
    assert json.loads(seen[2][6:]) == {
        "error": {
            "message": "the engine's ranks died while the request was in flight",
            "type": "service_unavailable_error",
            "param": None,
            "code": None,
        }
    }
    assert seen[3:] == ["data: [DONE]"]


def test_characters_are_whole_in_every_chunk(running: Running) -> None:
    running.engine.script = say("größe 日本語 🙂")
    events = running.events(CHATS, CHAT)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert text == "größe 日本語 🙂"


def test_a_time_out_cuts_the_answer(running: Running) -> None:
    running.engine.script = lambda request: [result(request, [72], finish=FinishReason.TIMED_OUT, is_final=True)]
    (choice,) = running.post(CHATS, CHAT).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
