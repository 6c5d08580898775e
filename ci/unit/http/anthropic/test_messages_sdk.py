"""The real `anthropic` package against the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from openai_server import TEXT, Running, say

from inflight.errors import QueueFull

MESSAGES: Any = [{"role": "user", "content": "hi"}]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
PING: Any = {"name": "ping", "description": "Pings.", "input_schema": {"type": "object", "properties": {"a": {}}}}
CALL = '<tool_call>{"name": "ping", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def client(thinking_server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=thinking_server.url, api_key="none", max_retries=0) as client:
        yield client


def create(client: anthropic.Anthropic, **options: Any) -> anthropic.types.Message:
    return client.messages.create(**{"model": "llm", "max_tokens": 300, "messages": MESSAGES, **options})


def stream(client: anthropic.Anthropic, **options: Any) -> tuple[list[str], anthropic.types.Message]:
    """Kinds of the events, repeated ones once, and the message that the package makes of them."""
    with client.messages.stream(**{"model": "llm", "max_tokens": 300, "messages": MESSAGES, **options}) as events:
        kinds = [event.type for event in events]
        return [
            kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before
        ], events.get_final_message()


def content_of(message: anthropic.types.Message) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True) for block in message.content]


def test_a_message_and_its_stream(thinking: Running, client: anthropic.Anthropic) -> None:
    thinking.engine.script = say(num_cached=5)
    whole = create(client, extra_body={"temperature": 0.5}, metadata={"user_id": "me"}, service_tier="auto")
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "llm")
    assert whole.id.startswith("msg_") and content_of(whole) == [{"type": "text", "text": TEXT}]
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    prompt = bytes(thinking.engine.sent.input_token_ids).decode()
    assert prompt == "user: hi\nassistant: "
    usage = whole.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(prompt) - 5, 5)
    assert usage.output_tokens == len(TEXT) + 1
    kinds, streamed = stream(client)
    assert content_of(streamed) == content_of(whole) and streamed.usage.output_tokens == len(TEXT) + 1
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


def test_thoughts_are_shown_to_those_who_ask_for_them(thinking: Running, client: anthropic.Anthropic) -> None:
    thinking.engine.script = say("<think>\nHm.\n</think>\n\nYes.")
    for thinking_config in (anthropic.NOT_GIVEN, {"type": "disabled"}, {**THINKING, "display": "omitted"}):
        message = create(client, max_tokens=2000, thinking=thinking_config)
        assert [block.type for block in message.content] == ["text"]
    options = {"max_tokens": 2000, "thinking": THINKING}
    for message in (create(client, **options), stream(client, **options)[1]):
        thought, answer = message.content
        assert thought.type == "thinking" and thought.thinking.strip() == "Hm."
        assert answer.type == "text" and answer.text.strip() == "Yes."


def test_parallel_calls_and_their_results(thinking: Running, client: anthropic.Anthropic) -> None:
    thinking.engine.script = say("Two:\n" + CALL + "\n" + CALL.replace("1", "2"))
    for message in (create(client, tools=[PING]), stream(client, tools=[PING])[1]):
        text, *calls = message.content
        assert message.stop_reason == "tool_use" and text.type == "text" and text.text.strip() == "Two:"
        assert [(call.name, call.input) for call in calls if call.type == "tool_use"] == [
            ("ping", {"a": 1}),
            ("ping", {"a": 2}),
        ]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": f"got {number}"}]}
        for number, call in enumerate(calls)
    ]
    thinking.engine.script = say()
    text = {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}}
    turns: Any = [
        *MESSAGES,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
        {
            "role": "user",
            "content": [*results, text],
        },
    ]
    create(client, messages=turns, tools=[PING], system=[{"type": "text", "text": "be brief"}])
    prompt = bytes(thinking.engine.sent.input_token_ids).decode()
    assert prompt.partition("\n")[0].startswith("tools: ") and prompt.partition("\n")[2] == (
        'system: be brief\nuser: hi\nassistant: ping{"a": 1}ping{"a": 2}Two:\n\n'
        "tool: got 0\ntool: got 1\nuser: go on\nassistant: "
    )


@pytest.mark.parametrize(
    ("script", "options", "reason", "sequence"),
    [
        (say(), {"max_tokens": 4}, "max_tokens", None),
        (say(), {"stop_sequences": ["wor"]}, "stop_sequence", "wor"),
        (say("x" * 600), {"max_tokens": 4000}, "model_context_window_exceeded", None),
    ],
)
def test_why_it_ends(
    thinking: Running,
    client: anthropic.Anthropic,
    script: Any,
    options: dict[str, Any],
    reason: str,
    sequence: str | None,
) -> None:
    thinking.engine.script = script
    for message in (create(client, **options), stream(client, **options)[1]):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "ping"}])
def test_calls_that_are_asked_for_are_why_it_ends(
    thinking: Running, client: anthropic.Anthropic, choice: dict[str, str]
) -> None:
    """Also of a named tool, where OpenAI's API says stop."""
    thinking.engine.script = say('[{"name": "ping", "parameters": {"a": 1}}]')
    options = {"tools": [PING], "tool_choice": choice}
    for message in (create(client, **options), stream(client, **options)[1]):
        (call,) = message.content
        assert call.type == "tool_use" and call.input == {"a": 1}
        assert message.stop_reason == "tool_use"


def test_an_answer_that_is_begun_is_continued(thinking: Running, client: anthropic.Anthropic) -> None:
    create(client, messages=[*MESSAGES, {"role": "assistant", "content": "The answer is ("}])
    prompt = bytes(thinking.engine.sent.input_token_ids).decode()
    assert prompt == "user: hi\nassistant: The answer is ("


def test_tokens_are_counted(thinking: Running, client: anthropic.Anthropic) -> None:
    message = create(client, tools=[PING])
    count = client.messages.count_tokens(model="llm", messages=MESSAGES, tools=[PING])
    assert count.input_tokens == message.usage.input_tokens == len(thinking.engine.sent.input_token_ids)


def test_a_schema_is_followed(thinking: Running, client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    create(client, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    guide = thinking.engine.sent.guided_decoding_params
    assert guide is not None and '"integer"' in guide.guide


def test_errors_are_the_packages_own(thinking: Running, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(client, model="claude")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be at least 1, got 0"):
        create(client, max_tokens=0)
    thinking.engine.refusal = QueueFull()
    try:
        with pytest.raises(anthropic.APIStatusError) as busy:
            create(client)
    finally:
        thinking.engine.refusal = None
    assert busy.value.status_code == 529
