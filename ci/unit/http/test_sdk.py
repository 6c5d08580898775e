"""The real `openai` package against the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai_server import TEXT, Running, result, say

from inflight.request import Request
from inflight.result import Response


@pytest.fixture(scope="module")
def client(shared: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        yield client


MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_chat(running: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="llm", messages=MESSAGES, logprobs=True, top_logprobs=2, n=2)
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "H"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_values_that_ask_for_nothing_are_taken(running: Running, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"user": "me", "safety_identifier": "x", "prompt_cache_key": "y", "service_tier": "auto"}
    options |= {"metadata": {"run": "7"}, "store": False, "verbosity": "medium", "prompt_cache_retention": "in_memory"}
    options |= {"logprobs": False, "modalities": ["text"], "n": 1, "logit_bias": {}, "stop": [], "seed": 1}
    answer = client.chat.completions.create(model="llm", messages=MESSAGES, **options).choices[0]
    earlier = {**answer.message.model_dump(), "annotations": [], "tool_calls": []}
    messages = [*MESSAGES, earlier, *MESSAGES]
    options |= {"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": False}}
    chunks = list(client.chat.completions.create(model="llm", messages=messages, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert bytes(running.engine.sent.input_token_ids).decode() == f"user: hi\nassistant: {TEXT}\nuser: hi\nassistant: "


def test_a_streamed_chat(running: Running, client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(model="llm", messages=MESSAGES, stream=True, stream_options=options)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(TEXT) + 1


def test_the_sdks_own_accumulation_of_a_stream(running: Running, client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="llm", messages=MESSAGES) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == TEXT


def test_completions(running: Running, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="llm", prompt=["a", "b"], max_tokens=5, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["aHello", "bHello"]
    assert answer.choices[0].logprobs.tokens == [*"aHello"]
    stream = client.completions.create(model="llm", prompt="a", max_tokens=5, stream=True, extra_body={"top_k": 3})
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello"
    assert running.engine.sent.sampling_config.top_k == 3


def test_models(running: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["llm"]
    assert client.models.retrieve("llm").owned_by == "inflight"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_errors_are_the_sdks(running: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="llm", prompt="a", max_tokens=5000)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)


def test_an_error_in_a_stream_is_raised_there(running: Running, client: openai.OpenAI) -> None:
    def fail(request: Request) -> list[Response]:
        error = Response(request_id=request.request_id, error_msg="broken", error_code="INTERNAL", outcome="failed")
        running.engine.push(result(request, [72]))
        later.append(error)
        return []

    later: list[Response] = []
    running.engine.script = fail
    stream = client.completions.create(model="llm", prompt="a", stream=True)
    assert next(stream).choices[0].text == "H"
    running.engine.push(*later)
    with pytest.raises(openai.APIError, match="broken"):
        next(stream)
    running.engine.script = say()


async def test_many_streams_at_once(running: Running) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:

        async def read(number: int) -> str:
            stream = await client.completions.create(model="llm", prompt=f"{number}", max_tokens=64, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*map(read, range(32))) == [TEXT] * 32
