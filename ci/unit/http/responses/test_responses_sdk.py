"""The real `openai` package against /v1/responses: create, stream, parse, tools, and what it finds again."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from openai_server import TEXT, Running, say

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OSLO = ROME.replace("Rome", "Oslo")
THOUGHT = "<think>\nWhere is it?</think>\n\n"


class City(pydantic.BaseModel):
    name: str
    people: int


def prompt_of(running: Running) -> str:
    return bytes(running.engine.sent.input_token_ids).decode()


def test_a_text(thinking: Running, client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="llm", input="hi", instructions="be short", temperature=0.5, metadata={"a": "b"}
    )
    assert (answer.output_text, answer.status, answer.error, answer.incomplete_details) == (
        TEXT,
        "completed",
        None,
        None,
    )
    assert prompt_of(thinking) == "system: be short\nuser: hi\nassistant: "
    assert (answer.temperature, answer.top_p, answer.instructions) == (0.5, 1.0, "be short")
    assert (answer.metadata, answer.parallel_tool_calls, answer.tool_choice, answer.tools) == (
        {"a": "b"},
        True,
        "auto",
        [],
    )
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt_of(thinking)), len(TEXT) + 1)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_the_tokens_of_an_input_are_counted_as_the_answer_counts_them(thinking: Running, client: openai.OpenAI) -> None:
    first = client.responses.create(model="llm", input="My name is Ada.")
    options: dict[str, Any] = {"model": "llm", "instructions": "be short", "tools": [WEATHER]}
    options |= {"input": "hi", "previous_response_id": first.id}
    usage = client.responses.create(**options).usage
    asked = len(thinking.engine.requests)
    count = client.responses.input_tokens.count(**options)
    assert (count.object, count.input_tokens) == ("response.input_tokens", usage.input_tokens)
    assert len(thinking.engine.requests) == asked, "the engine is not asked"
    with pytest.raises(openai.BadRequestError, match="input is empty"):
        client.responses.input_tokens.count(model="llm")
    assert client.responses.input_tokens.count(model="llm", input="a b " * 100).input_tokens > 400


def test_a_stream(thinking: Running, client: openai.OpenAI) -> None:
    thinking.engine.script = say(THOUGHT + TEXT)
    events = list(client.responses.create(model="llm", input="hi", stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Where is it?"
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == TEXT


def test_the_sdks_own_accumulation_of_a_stream(thinking: Running, client: openai.OpenAI) -> None:
    thinking.engine.script = say(THOUGHT + "I look. " + ROME + OSLO)
    with client.responses.stream(model="llm", input="hi", tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_response()
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert answer.output_text == "I look. "
    assert [item.arguments for item in answer.output[2:]] == ['{"city": "Rome"}', '{"city": "Oslo"}']


def test_a_parsed_answer(thinking: Running, client: openai.OpenAI) -> None:
    thinking.engine.script = say('{"name": "Rome", "people": 3}')
    answer = client.responses.parse(model="llm", input="hi", text_format=City)
    assert answer.output_parsed == City(name="Rome", people=3)
    guide = thinking.engine.sent.guided_decoding_params
    assert guide is not None
    assert json.loads(guide.guide)["properties"].keys() == {"name", "people"}
    assert answer.text is not None
    assert answer.text.format is not None
    assert (answer.text.format.type, answer.text.format.name) == ("json_schema", "City")
    with client.responses.stream(model="llm", input="hi", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(name="Rome", people=3)


def test_parsed_arguments_of_a_call_that_must_be_made(thinking: Running, client: openai.OpenAI) -> None:
    thinking.engine.script = say('[{"name": "City", "parameters": {"name": "Rome", "people": 3}}]')
    tools: Any = [openai.pydantic_function_tool(City)]
    for choice in ("required", {"type": "function", "name": "City"}):
        answer = client.responses.parse(model="llm", input="hi", tools=tools, tool_choice=choice)
        (call,) = answer.output
        assert call.type == "function_call"
        assert call.parsed_arguments == City(name="Rome", people=3)
        assert answer.status == "completed"


def test_a_loop_of_calls_with_the_items_sent_back(thinking: Running, client: openai.OpenAI) -> None:
    thinking.engine.script = say(THOUGHT + ROME)
    items: list[Any] = [{"role": "user", "content": "hi"}]
    answer = client.responses.create(model="llm", input=items, tools=[WEATHER])
    items += answer.output
    call = answer.output[-1]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    thinking.engine.script = say("Sunny.")
    assert client.responses.create(model="llm", input=items, tools=[WEATHER]).output_text == "Sunny."
    assert prompt_of(thinking).endswith('user: hi\nassistant: weather{"city": "Rome"}\ntool: sunny\nassistant: ')


def test_a_loop_of_calls_that_the_server_remembers(thinking: Running, client: openai.OpenAI) -> None:
    thinking.engine.script = say(ROME)
    first = client.responses.create(model="llm", input="hi", instructions="be short", tools=[WEATHER])
    output: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}
    thinking.engine.script = say("Sunny.")
    second = client.responses.create(model="llm", input=[output], previous_response_id=first.id, tools=[WEATHER])
    assert second.previous_response_id == first.id
    assert "be short" not in prompt_of(thinking)
    third = client.responses.create(model="llm", input="And now?", previous_response_id=second.id)
    expected = (
        'user: hi\nassistant: weather{"city": "Rome"}\ntool: sunny\nassistant: Sunny.\nuser: And now?\nassistant: '
    )
    assert prompt_of(thinking) == expected
    assert client.responses.retrieve(third.id) == third
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="llm", input="?", previous_response_id=first.id)
    assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")
    # Those that continue it have its turns.
    assert client.responses.create(model="llm", input="?", previous_response_id=third.id).status == "completed"


def test_a_response_need_not_be_kept(thinking: Running, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="llm", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(answer.id)


def test_a_cut_answer_is_incomplete(thinking: Running, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="llm", input="hi", max_output_tokens=5)
    assert (answer.status, answer.output_text, answer.output[0].status) == ("incomplete", TEXT[:5], "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(model="llm", input="hi", max_output_tokens=5, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.usage.output_tokens == 5


def test_errors_are_the_sdks(thinking: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="llm", input="hi", max_output_tokens=5000)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "max_output_tokens")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-5", input="hi")


def test_log_probabilities(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as plain:
        options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3}
        answer = plain.responses.create(model="llm", input="hi", **options)
        events = list(plain.responses.create(model="llm", input="hi", stream=True, **options))
    entries = answer.output[0].content[0].logprobs
    assert [entry.token for entry in entries] == [*TEXT[:3]]
    assert [top.token for top in entries[0].top_logprobs] == ["H", "G"]
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in deltas] == [*TEXT[:3]]
    assert events[-1].response.output[0].content[0].logprobs == entries


async def test_the_asynchronous_client(thinking: Running) -> None:
    thinking.engine.script = say(THOUGHT + ROME)
    async with openai.AsyncOpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.responses.create(model="llm", input="hi", tools=[WEATHER])
        assert [item.type for item in answer.output] == ["reasoning", "function_call"]
        async with client.responses.stream(model="llm", input="hi", tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output[1].name == "weather"
        assert kinds[-1] == "response.completed"
        thinking.engine.script = say('{"name": "Rome", "people": 3}')
        parsed = await client.responses.parse(model="llm", input="hi", text_format=City)
        assert parsed.output_parsed == City(name="Rome", people=3)
