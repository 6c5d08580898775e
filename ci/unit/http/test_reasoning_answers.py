"""What a model has thought stands apart from its answer, and tools are called by the answer alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai_server import CHAT, CHATS, PlayedEngine, Running, checkpoint_folder, openai_server, say

from inflight.guided_decoding import Reasoning

TOOL = {"type": "function", "function": {"name": "ping"}}
CALL = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
FORCED = '[{"name": "ping", "parameters": {}}]'
THOUGHT = f"<think>\nMaybe {CALL}?</think>\n\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = PlayedEngine()
    folder = checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))
    settings = {"tool_parser": "hermes", "reasoning_parser": "qwen3", "chat_template_kwargs": ["think"]}
    with openai_server(engine, folder, **settings) as url:
        yield Running(url, engine)


def message(server: Running, text: str, **body: Any) -> dict[str, Any]:
    server.engine.script = say(text)
    response = server.post(CHATS, {**CHAT, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]["message"]
    return found


def test_it_is_a_field_of_the_message(server: Running) -> None:
    assert message(server, "<think>I add.</think>\n4") == {
        "role": "assistant",
        "content": "4",
        "reasoning": "I add.",
    }
    assert message(server, "4") == {"role": "assistant", "content": "4"}
    assert message(server, "<think>I add") == {"role": "assistant", "content": None, "reasoning": "I add"}


def test_a_prompt_may_open_it(server: Running) -> None:
    thinking = {"chat_template_kwargs": {"think": True}}
    found = message(server, "I add.</think>4", **thinking)
    assert (found["reasoning"], found["content"]) == ("I add.", "4")


@pytest.mark.parametrize(
    "body",
    [
        {"guided_choice": ["4"]},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},
    ],
    ids=["choice", "object", "forced call", "strict tool"],
)
def test_a_grammar_is_that_of_the_answer(server: Running, body: dict[str, Any]) -> None:
    """Before it the model may think, and does so if the prompt has opened the reasoning."""
    text = FORCED if body.get("tool_choice") else CALL if "tools" in body else "4"
    for prompt, thought in (({}, "<think>"), ({"think": True}, "")):
        found = message(server, f"{thought}I add.</think>\n{text}", chat_template_kwargs=prompt, **body)
        guide = server.engine.sent.guided_decoding_params
        assert guide is not None
        assert guide.reasoning == Reasoning(opening="<think>", closing="</think>", is_open=bool(prompt))
        assert found["reasoning"] == "I add."
        assert found["content"] == "4" or found["tool_calls"][0]["function"] == {"name": "ping", "arguments": "{}"}
    message(server, text, messages=[{"role": "user", "content": "</think>"}], add_generation_prompt=False, **body)
    guide = server.engine.sent.guided_decoding_params
    assert guide is not None and guide.reasoning is None, "the prompt says that it has thought"


def test_tools_are_called_by_the_answer_alone(server: Running) -> None:
    found = message(server, THOUGHT + CALL, tools=[TOOL])
    assert found["reasoning"] == f"Maybe {CALL}?"
    assert [call["function"]["name"] for call in found["tool_calls"]] == ["ping"]
    assert "tool_calls" not in message(server, THOUGHT, tools=[TOOL])


def test_a_stream_has_the_same(server: Running) -> None:
    server.engine.script = say(THOUGHT + "So. " + CALL)
    events = server.events(CHATS, {**CHAT, "tools": [TOOL]})[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == f"Maybe {CALL}?"
    assert "".join(delta.get("content", "") for delta in deltas) == "So. "
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    kinds = [kind for delta in deltas[1:] for kind in delta]
    assert kinds == sorted(kinds, key=["reasoning", "content", "tool_calls"].index)


def test_the_sdk_shows_it(server: Running) -> None:
    server.engine.script = say("<think>I add.</think>4")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(model="llm", stream=True, **CHAT)
        thought = [getattr(chunk.choices[0].delta, "reasoning", None) or "" for chunk in stream]
        assert "".join(thought) == "I add."
        answer = client.chat.completions.create(model="llm", **CHAT).choices[0].message
        assert (answer.reasoning, answer.content) == ("I add.", "4")


def test_it_can_be_left_out(server: Running, running: Running) -> None:
    assert message(server, THOUGHT + "4", include_reasoning=False) == {"role": "assistant", "content": "4"}
    for more in ({"logprobs": True}, {"return_token_ids": True}):
        response = server.post(CHATS, {**CHAT, "include_reasoning": False, **more})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "include_reasoning")
    response = running.post(CHATS, {**CHAT, "include_reasoning": False})
    assert "reasoning_parser" in response.json()["error"]["message"]
    assert running.post(CHATS, {**CHAT, "include_reasoning": True}).status_code == 200


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_what_was_thought_before_is_taken_under_both_names(server: Running, name: str) -> None:
    history = [*CHAT["messages"], {"role": "assistant", "content": "4", name: "I add."}, *CHAT["messages"]]
    assert message(server, "4", messages=history)["content"] == "4"
