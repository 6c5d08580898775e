"""What agents are made with, against a real server: strict tools, structured outputs, langchain-openai.

The default model knows nothing of tools. A bias makes it begin a call; all else in a call is the grammar's.
"""

from __future__ import annotations

import enum
import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai_server import CLIENT
from server_process import MODEL_REPOSITORY, ServerProcess
from waiting import until

CHECKPOINT = MODEL_REPOSITORY / "llm" / "1" / "checkpoint"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}<|end_of_turn|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}<|end_of_turn|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STORY: list[Any] = [{"role": "user", "content": "Tell a story about a dog."}]


class Animal(str, enum.Enum):
    CAT = "cat"
    DOG = "dog"


class Feed(pydantic.BaseModel):
    """Give an animal its food."""

    animal: Animal
    count: int = pydantic.Field(ge=1, le=9)


class Report(pydantic.BaseModel):
    """How it went."""

    animal: Animal
    is_happy: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With a chat template that tells the model of tools, and writes calls as Llama 3.1 does."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for path in CHECKPOINT.glob("*.json"):
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with ServerProcess(
        parameters={"max_seq_len": "1024", "num_threads": "1", "tokenizer_dir": str(folder)},
        openai={"port": 0},
        drain_timeout=60.0,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return f"{server.openai_url}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def calls_likely(server: ServerProcess) -> dict[str, int]:
    """The bias that makes a text begin with a brace, and so with a call."""
    return bias(server, "{")


def bias(server: ServerProcess, character: str) -> dict[str, int]:
    """One that makes a character as likely as can be."""
    body = {"prompt": f"a{character}", "add_special_tokens": False}
    token = CLIENT.post(f"{server.openai_url}/tokenize", json=body).json()["tokens"][-1]
    return {str(token): 100}


@pytest.fixture(scope="module")
def model(url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key="none", model="llm", temperature=0, max_retries=0, max_tokens=400)


# -- the openai package ------------------------------------------------------------------------------------------------


def test_a_model_that_may_choose_does(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Feed)]
    answer = client.chat.completions.create(model="llm", messages=STORY, temperature=0, max_tokens=40, tools=tools)
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_strict_tools_are_called_as_their_models_say(client: openai.OpenAI, calls_likely: dict[str, int]) -> None:
    """By two choices at once, whole and streamed, with an answer's form beside them."""
    options: dict[str, Any] = {
        "model": "llm",
        "messages": STORY,
        "temperature": 1.5,
        "seed": 3,
        "n": 2,
        "logit_bias": calls_likely,
        "parallel_tool_calls": False,
        "tools": [openai.pydantic_function_tool(Feed)],
    }
    whole = client.chat.completions.parse(**options)
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion()
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        (call,) = one.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Feed)
        assert other.message.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments
        assert one.finish_reason == other.finish_reason == "tool_calls"


def test_calls_of_strict_tools_are_checked_once_more(
    server: ServerProcess, client: openai.OpenAI, calls_likely: dict[str, int]
) -> None:
    def num_checked() -> float:
        lines = CLIENT.get(f"{server.openai_url}/metrics").text.splitlines()
        (line,) = (line for line in lines if line.startswith("inflight_guided_answers_checked_total"))
        return float(line.split()[-1])

    before, tools = num_checked(), [openai.pydantic_function_tool(Feed)]
    answer = client.chat.completions.create(
        model="llm", messages=STORY, logit_bias=calls_likely, parallel_tool_calls=False, tools=tools
    )
    assert answer.choices[0].message.tool_calls
    until(lambda: num_checked() == before + 1, "the call is checked")


def test_an_answer_of_a_model_beside_tools(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Feed)]
    options = {"model": "llm", "messages": STORY, "temperature": 0, "response_format": Report, "tools": tools}
    message = client.chat.completions.parse(**options).choices[0].message
    assert isinstance(message.parsed, Report) or isinstance(message.tool_calls[0].function.parsed_arguments, Feed)
    with client.chat.completions.stream(**{**options, "tool_choice": "none"}) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Report)


# -- langchain-openai --------------------------------------------------------------------------------------------------


def test_langchain_reads_answers_and_streams(model: ChatOpenAI, client: openai.OpenAI) -> None:
    expected = client.chat.completions.create(model="llm", messages=STORY, temperature=0, max_tokens=400)
    answer = model.invoke([HumanMessage(STORY[0]["content"])])
    assert answer.content == expected.choices[0].message.content
    assert answer.usage_metadata["output_tokens"] == expected.usage.completion_tokens
    chunks = list(model.stream(STORY, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    assert [chunk.usage_metadata["total_tokens"] for chunk in chunks if chunk.usage_metadata] == [
        answer.usage_metadata["total_tokens"]
    ]


async def test_langchain_awaits_many_at_once(model: ChatOpenAI) -> None:
    one, *others = await model.abatch([STORY] * 4)
    assert all(each.content == one.content for each in others)


def test_langchain_binds_tools(model: ChatOpenAI, calls_likely: dict[str, int]) -> None:
    """Strict ones that the model may call, and any that it must; the conversation goes on with their results."""
    may = model.bind_tools([Feed], strict=True, parallel_tool_calls=False).bind(logit_bias=calls_likely)
    must = model.bind_tools([Feed], tool_choice="required", parallel_tool_calls=False)
    named = model.bind_tools([Feed, Report], tool_choice="Feed")
    for bound in (may, must, named):
        answer = bound.invoke(STORY)
        (call,) = answer.tool_calls
        assert call["name"] == "Feed"
        Feed(**call["args"])
        joined: Any = None
        for chunk in bound.stream(STORY):
            joined = chunk if joined is None else joined + chunk
        assert [(each["name"], each["args"]) for each in joined.tool_calls] == [("Feed", call["args"])]
        assert answer.content == joined.content == ""
    result = ToolMessage("The dog is full.", tool_call_id=call["id"])
    assert isinstance(model.bind_tools([Feed]).invoke([HumanMessage("Hi."), answer, result]), AIMessage)


@pytest.mark.parametrize("options", [{"method": "json_schema", "strict": True}, {"method": "function_calling"}])
def test_langchain_structures_answers(model: ChatOpenAI, options: dict[str, Any]) -> None:
    assert isinstance(model.with_structured_output(Report, **options).invoke(STORY), Report)
    raw = model.with_structured_output(Report.model_json_schema(), **options).invoke(STORY)
    assert set(raw) == {"animal", "is_happy"}


def test_langchain_asks_for_any_object(server: ServerProcess, model: ChatOpenAI) -> None:
    brief = model.model_copy(update={"logit_bias": bias(server, "}")})
    answer = brief.with_structured_output(Report, method="json_mode", include_raw=True).invoke(STORY)
    assert json.loads(answer["raw"].content) == {} and answer["parsing_error"] is not None


def test_langchain_embeds(url: str, client: openai.OpenAI) -> None:
    # With its own check of lengths it would send token ids of OpenAI's tokenizer.
    embeddings = OpenAIEmbeddings(base_url=url, api_key="none", model="llm", check_embedding_ctx_length=False)
    expected = client.embeddings.create(model="llm", input=["A dog."], encoding_format="float").data[0].embedding
    first, second = embeddings.embed_documents(["A dog.", "The big cat sat."])
    assert embeddings.embed_query("A dog.") == pytest.approx(first, abs=1e-5)
    assert first == pytest.approx(expected, abs=1e-5)
    assert first != pytest.approx(second, abs=1e-2)
