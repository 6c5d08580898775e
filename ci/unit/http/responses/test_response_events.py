"""A response's events: which come, in which order, and what each holds; and that they are the whole answer."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fake_tokenizer import END
from hypothesis import given
from hypothesis import strategies as st
from openai_server import CLIENT, TEXT, PlayedEngine, Running, checkpoint_folder, openai_server, result, say

from inflight.asking.chat_format import ChatFormat
from inflight.asking.reasoning import REASONING_TAGS
from inflight.asking.tools.parser import make_tool_parser
from inflight.asking.tools.tool import Tool
from inflight.http.dialects.openai.responses.event_frames import EventFrames
from inflight.http.dialects.openai.responses.output import Output
from inflight.request import Request
from inflight.result import FinishReason, Response

RESPONSES = "/v1/responses"
PING: dict[str, Any] = {"type": "function", "name": "ping", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "ping", "arguments": {"a": 1}}</tool_call>'
PIECES = ("<think>", "</think>", CALL, CALL[:20], CALL[:45], "\n", " ", "dog", "<", '"', "ß")
PART = ["response.content_part.added", "response.{}.delta", "response.{}.done", "response.content_part.done"]
ADDED, DONE = "response.output_item.added", "response.output_item.done"


def events_of(running: Running, **body: Any) -> list[dict[str, Any]]:
    response = running.post(RESPONSES, {"input": "hi", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return read_events(response.text)


def read_events(text: str) -> list[dict[str, Any]]:
    """Each has a line that names it, and the numbers count on."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """Without repeated deltas."""
    kinds = [event["type"] for event in events]
    return [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]


def test_the_events_of_reasoning_text_and_calls(thinking: Running) -> None:
    thinking.engine.script = say("<think>Hm.</think>So. " + CALL + CALL)
    events = events_of(thinking, tools=[PING])
    calls = [ADDED, *(f"response.function_call_arguments.{end}" for end in ("delta", "done")), DONE]
    assert kinds_of(events) == [
        "response.created",
        "response.in_progress",
        *[ADDED, *(kind.format("reasoning_text") for kind in PART), DONE],
        *[ADDED, *(kind.format("output_text") for kind in PART), DONE],
        *calls,
        *calls,
        "response.completed",
    ]
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (last["status"], last["id"]) == ("completed", first["id"])
    assert [event["item"] for event in events if event["type"] == DONE] == last["output"]
    for index, item in enumerate(last["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        assert mine[0]["item"]["id"] == mine[-1]["item"]["id"] == item["id"]
        assert mine[0]["item"]["status"] == "in_progress"
        assert {event["item_id"] for event in mine[1:-1]} == {item["id"]}
        deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        (done,) = (event for event in mine if event["type"].endswith(("text.done", "arguments.done")))
        assert deltas == done.get("text", done.get("arguments"))


def test_the_items_of_an_answer(thinking: Running) -> None:
    thinking.engine.script = say("<think>Hm.</think>So. " + CALL)
    whole = thinking.post(RESPONSES, {"input": "hi", "tools": [PING]}).json()
    streamed = events_of(thinking, tools=[PING])[-1]["response"]
    reasoning, message, call = whole["output"]
    assert reasoning == {
        "id": reasoning["id"],
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
        "encrypted_content": None,
        "status": "completed",
    }
    assert message == {
        "id": message["id"],
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "So. ", "annotations": [], "logprobs": []}],
    }
    assert call == {
        "id": call["id"],
        "type": "function_call",
        "call_id": call["call_id"],
        "name": "ping",
        "arguments": '{"a": 1}',
        "status": "completed",
    }
    assert whole.keys() == streamed.keys()
    own = ("id", "created_at", "completed_at", "output")
    assert {name: whole[name] for name in whole if name not in own} == {
        name: streamed[name] for name in streamed if name not in own
    }


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [
        ("4", 0),
        ("<think>Hm.</think>\n4", len("<think>Hm.</think>")),
        ("  <think>Hm.</think>4", len("  <think>Hm.</think>")),
        ("<think>Hm.", len("<think>Hm.") + 1),  # the end token as well
    ],
)
def test_tokens_of_reasoning_are_counted(thinking: Running, text: str, num_tokens: int) -> None:
    thinking.engine.script = say(text)
    whole = thinking.post(RESPONSES, {"input": "hi"}).json()["usage"]
    assert whole == events_of(thinking)[-1]["response"]["usage"]
    assert whole["output_tokens_details"] == {"reasoning_tokens": num_tokens}
    assert whole["output_tokens"] == len(text) + 1


def test_reasoning_that_the_prompt_opens_is_counted(thinking: Running) -> None:
    thinking.engine.script = say("Hm.</think>4")
    answer = thinking.post(RESPONSES, {"input": "hi", "chat_template_kwargs": {"think": True}}).json()
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Hm.</think>")}
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]


def test_cached_tokens_are_what_the_engine_says(running: Running) -> None:
    running.engine.script = say(num_cached=16)
    usage = running.post(RESPONSES, {"input": "hi"}).json()["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize(("num_tokens", "status"), [(len(CALL) - 20, "incomplete"), (len(CALL), "completed")])
def test_a_call_is_whole_if_its_arguments_are(thinking: Running, num_tokens: int, status: str) -> None:
    thinking.engine.script = say(CALL)
    answer = thinking.post(RESPONSES, {"input": "hi", "tools": [PING], "max_output_tokens": num_tokens}).json()
    assert (answer["status"], answer["output"][0]["status"]) == ("incomplete", status)


def test_a_time_out_cuts_the_answer(running: Running) -> None:
    running.engine.script = lambda request: [result(request, [72], finish=FinishReason.TIMED_OUT, is_final=True)]
    answer = running.post(RESPONSES, {"input": "hi", "allotted_time_ms": 5}).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "timeout"})


def test_an_answer_without_text_has_no_items(running: Running) -> None:
    running.engine.script = say("")
    answer = running.post(RESPONSES, {"input": "hi"}).json()
    assert (answer["status"], answer["output"]) == ("completed", [])
    assert kinds_of(events_of(running)) == ["response.created", "response.in_progress", "response.completed"]


def test_characters_are_whole_in_every_delta(running: Running) -> None:
    running.engine.script = say("größe 日本語 🙂")
    deltas = [event["delta"] for event in events_of(running) if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "größe 日本語 🙂"
    assert END not in "".join(deltas)


def test_an_error_before_the_first_token_has_a_status(running: Running) -> None:
    running.engine.script = lambda request: [failure(request, "the guide is no JSON schema", "INVALID_ARGUMENT")]
    response = running.post(RESPONSES, {"input": "hi", "stream": True})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the guide is no JSON schema")


def test_an_error_behind_tokens_ends_the_stream_with_a_failed_response(running: Running) -> None:
    later: list[Response] = []

    def fail_later(request: Request) -> list[Response]:
        later.append(failure(request, "the engine's ranks died while the request was in flight", "UNAVAILABLE"))
        return [result(request, [72])]

    running.engine.script = fail_later
    with CLIENT.stream("POST", f"{running.url}{RESPONSES}", json={"input": "hi", "stream": True}) as response:
        pieces = response.iter_text()
        seen = [next(pieces)]
        running.engine.push(*later)
        events = read_events("".join([*seen, *pieces]))
    failed = events[-1]["response"]
    assert (events[-1]["type"], failed["status"], failed["usage"]) == ("response.failed", "failed", None)
    message = "the engine's ranks died while the request was in flight"
    assert failed["error"] == {"code": "server_error", "message": message}
    assert failed["output"][0]["content"][0]["text"] == "H"
    assert running.get(f"{RESPONSES}/{failed['id']}").status_code == 404
    running.engine.script = say()
    assert running.post(RESPONSES, {"input": "hi"}).json()["output"][0]["content"][0]["text"] == TEXT


def test_a_stream_that_does_not_end_in_time_is_told(tmp_path: Path) -> None:
    engine = PlayedEngine(lambda request: [result(request, [72])])
    with contextlib.ExitStack() as stack:
        with openai_server(engine, checkpoint_folder(tmp_path)) as url:
            stream = CLIENT.stream("POST", url + RESPONSES, json={"input": "hi", "stream": True})
            pieces = stack.enter_context(stream).iter_text()
            seen = [next(pieces)]
        last = read_events("".join([*seen, *pieces]))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"] == "the engine was shut down"
    assert engine.cancelled


@given(st.lists(st.sampled_from([*PIECES]), max_size=12), st.randoms(use_true_random=False))
def test_items_do_not_depend_on_how_text_is_cut(pieces: list[str], random: Random) -> None:
    text = "".join(pieces)
    cuts = sorted(random.sample(range(len(text) + 1), min(len(text), 6)))
    parts = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    tool = Tool(name="ping")
    format = ChatFormat(
        make_tool_parser=lambda: make_tool_parser("hermes", [tool]),
        make_splitter=REASONING_TAGS["qwen3"].splitter_maker(""),
    )
    whole, cut, frames = Output(format), Output(format), EventFrames()
    whole.add(text, [])
    whole.finish(is_cut=False)
    data = b"".join([*(frames.frames(cut.add(part, [])) for part in parts), frames.frames(cut.finish(is_cut=False))])
    own = ("id", "call_id")
    expected, found = ([{k: v for k, v in each.items() if k not in own} for each in o.fields()] for o in (whole, cut))
    assert found == expected
    assert [event["item"] for event in read_events(data.decode()) if event["type"] == DONE] == cut.fields()


def failure(request: Request, message: str, code: str) -> Response:
    return Response(request_id=request.request_id, error_msg=message, error_code=code, outcome="failed")
