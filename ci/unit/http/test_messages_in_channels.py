"""A server of gpt-oss: its tokenizer, its template and nothing that the operator sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_templates import SHAPES
from fake_tokenizer import byte_tokenizer_with
from openai_server import CHAT, CHATS, PlayedEngine, Running, checkpoint_folder, openai_server, result

from inflight.asking.tool_use import choose_reasoning_parser, choose_tool_parser
from inflight.asking.tools.channels import FINAL, START, TAGS
from inflight.errors import ConfigurationError
from inflight.guided_decoding import GuidedDecodingParams
from inflight.result import FinishReason

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
THOUGHT = f"<|channel|>analysis<|message|>I look.<|end|>{START}"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
TOKENIZER = byte_tokenizer_with(*TAGS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))
    (folder / "chat_template.jinja").write_text(SHAPES["gpt-oss"].source)
    engine = PlayedEngine()
    with openai_server(engine, folder, tokenizer=TOKENIZER) as url:
        yield Running(url, engine)


def write(server: Running, text: str) -> None:
    """The model's next output."""
    ids = [*TOKENIZER.encode_plain(text), TOKENIZER.end_ids[0]]
    server.engine.script = lambda request: [result(request, ids, finish=FinishReason.END_ID, is_final=True)]


def ask(server: Running, text: str, **body: Any) -> dict[str, Any]:
    write(server, text)
    response = server.post(CHATS, {**CHAT, **body})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def sent_guide(server: Running) -> GuidedDecodingParams:
    guide = server.engine.sent.guided_decoding_params
    assert guide is not None
    return guide


def test_thought_and_answer_are_told_apart(server: Running) -> None:
    message = ask(server, f"{THOUGHT}{FINAL}Sunny.")["message"]
    assert message == {"role": "assistant", "reasoning": "I look.", "content": "Sunny."}
    assert bytes(server.engine.sent.input_token_ids[-9:]) == b"assistant"


@pytest.mark.parametrize(
    "body",
    [{}, {"tool_choice": "required"}, {"tools": [STRICT]}, {"tools": [STRICT], "guided_white_space": "compact"}],
    ids=["chosen", "forced", "strict", "compact"],
)
def test_a_call_is_a_message_of_its_own(server: Running, body: dict[str, Any]) -> None:
    choice = ask(server, THOUGHT + CALL, **{"tools": [TOOL], **body})
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("I look.", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    if body:
        assert CALL.split("{")[0] in sent_guide(server).guide
        assert sent_guide(server).reasoning is None, "the messages of the grammar hold the thoughts"
        assert set(sent_guide(server).shown_token_ids) == {TOKENIZER.encode_plain(tag)[0] for tag in TAGS}


def test_a_response_format_is_that_of_the_final_message(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    message = ask(server, f'{THOUGHT}{FINAL}{{"city": "Rome"}}', response_format=form)["message"]
    assert (message["reasoning"], message["content"]) == ("I look.", '{"city": "Rome"}')
    reasoning = sent_guide(server).reasoning
    assert reasoning is not None and reasoning.before_answer == FINAL
    begun = [*CHAT["messages"], {"role": "assistant", "content": '{"city": '}]
    more = ask(server, '"Rome"}', response_format=form, messages=begun, continue_final_message=True)["message"]
    assert more["content"] == '"Rome"}' and sent_guide(server).reasoning is None


def test_a_response_has_items_in_the_models_order_and_counts_its_thoughts(server: Running) -> None:
    spoken = f"<|channel|>commentary<|message|>I call.<|end|>{START}"
    write(server, THOUGHT + spoken + THOUGHT + CALL)
    tool = {"type": "function", **TOOL["function"]}
    response = server.post("/v1/responses", {"input": "hi", "tools": [tool]}).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "reasoning", "function_call"]
    thought = len(TOKENIZER.encode_plain("<|channel|>analysis<|message|>I look.<|end|>"))
    start = len(TOKENIZER.encode_plain(f"<|end|>{START}"))  # of the message between them
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2 * thought + start


def test_the_checkpoints_type_tells_where_the_template_does_not(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    engine = PlayedEngine()
    with openai_server(engine, folder, tokenizer=TOKENIZER) as url:
        message = ask(Running(url, engine), THOUGHT + CALL, tools=[TOOL])["message"]
    assert message["reasoning"] == "I look." and message["tool_calls"]
    assert choose_tool_parser("", ["hermes"], knows_tools=True, model_type="gpt_oss")[0] == "hermes"


@pytest.mark.parametrize(
    ("asked", "tool_parser", "found"),
    [
        ("", "harmony", "harmony"),
        ("harmony", "openai", "harmony"),
        ("qwen3", "hermes", "qwen3"),
        ("qwen3", "", "qwen3"),
        ("", "hermes", ""),
        ("qwen3", "harmony", None),
        ("harmony", "hermes", None),
        ("harmony", "", None),
    ],
)
def test_calls_and_reasoning_in_messages_go_together(asked: str, tool_parser: str, found: str | None) -> None:
    if found is not None:
        assert choose_reasoning_parser(asked, tool_parser) == found
        return
    with pytest.raises(ConfigurationError, match=f"reasoning_parser {asked} "):
        choose_reasoning_parser(asked, tool_parser)
