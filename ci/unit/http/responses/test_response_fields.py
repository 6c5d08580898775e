"""What the body of /v1/responses asks of the engine, and what it is refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai_server import PlayedEngine, Running, checkpoint_folder, openai_server, say

from inflight.guided_decoding import GuideType
from inflight.http.dialects.openai.fields import TextBody
from inflight.http.dialects.openai.responses import fields
from inflight.http.dialects.openai.responses.fields import ACCEPTED_UNUSED, REFUSED, ResponseBody

RESPONSES = "/v1/responses"
PING: dict[str, Any] = {"type": "function", "name": "ping", "parameters": {"type": "object"}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    functions = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": functions}


USER: dict[str, Any] = {"role": "user", "content": "hi"}


def ask(running: Running, given: Any = "hi", **body: Any) -> str:
    """The prompt that becomes of it."""
    response = running.post(RESPONSES, {"input": given, **body})
    assert response.status_code == 200, response.text
    return bytes(running.engine.sent.input_token_ids).decode()


def call(call_id: str, city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city})
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": arguments}


def test_items_of_every_kind_become_a_chat(running: Running) -> None:
    items = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        call("1", "Rome"),
        call("2", "Oslo"),
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why?"},
    ]
    assert ask(running, items, instructions="be kind") == (
        "system: be kind\nsystem: short\nuser: a\nb\n"
        'assistant: weather{"city": "Rome"}weather{"city": "Oslo"}I look.\n'
        "tool: sunny\ntool: rain\nassistant: no\nassistant: yes\nuser: why?\nassistant: "
    )


def test_reasoning_reaches_the_template(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path)
    template = "{% for m in messages %}{{ m.role }}<{{ m.reasoning_content }}>{{ m.content }};{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    engine = PlayedEngine()

    def reasoning(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    items = [USER, reasoning("a"), {"role": "assistant", "content": "b"}, USER, reasoning("c"), reasoning("d")]
    with openai_server(engine, folder) as url:
        assert ask(Running(url, engine), items) == "user<>hi;assistant<a>b;user<>hi;assistant<c\nd>;"


def test_fields_reach_the_engine(running: Running) -> None:
    ask(
        running,
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        top_k=3,
        seed=5,
        frequency_penalty=0.25,
        min_tokens=2,
        cache_salt="mine",
        priority=-1,
        allotted_time_ms=900,
        stop_token_ids=[7],
        chat_template_kwargs={"mood": "glad"},
        user="me",
        safety_identifier="me",
        prompt_cache_key="us",
        max_tool_calls=3,
    )
    sent = running.engine.sent
    assert (sent.max_tokens, sent.cache_salt, sent.allotted_time_ms, sent.end_ids[-1]) == (7, "mine", 900, 7)
    config = sent.sampling_config
    assert (config.temperature, config.top_p, config.top_k, config.seed, config.min_tokens) == (0.5, 0.9, 3, 5, 2)
    assert config.frequency_penalty == 0.25
    assert sent.priority > 0.5
    assert bytes(sent.input_token_ids).endswith(b"(glad)")


def test_without_a_bound_an_answer_may_take_the_rest_of_the_context(running: Running) -> None:
    prompt = ask(running)
    assert running.engine.sent.max_tokens == 512 - len(prompt)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, GuideType.JSON),
        ({"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}, GuideType.JSON_SCHEMA),
    ],
)
def test_formats_are_grammars(running: Running, form: dict[str, Any], kind: GuideType | None) -> None:
    ask(running, text={"format": form})
    guide = running.engine.sent.guided_decoding_params
    assert (guide and guide.guide_type) == kind


def test_tools_reach_the_template_and_none_may_be_called(running: Running) -> None:
    prompt = ask(running, tools=[PING], tool_choice="none")
    assert '"function": {"name": "ping", "parameters": {"type": "object"}}' in prompt
    assert ask(running, tools=[], tool_choice="auto") == "user: hi\nassistant: "


def test_without_parallel_calls_the_first_is_kept(thinking: Running) -> None:
    thinking.engine.script = say('<tool_call>{"name": "ping", "arguments": {}}</tool_call>' * 2)
    body = {"input": "hi", "tools": [PING]}
    assert len(thinking.post(RESPONSES, body).json()["output"]) == 2
    assert len(thinking.post(RESPONSES, {**body, "parallel_tool_calls": False}).json()["output"]) == 1


def test_effort_is_a_variable_of_the_template(tmp_path: Path, running: Running) -> None:
    folder = checkpoint_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ reasoning_effort }}: {{ messages[-1].content }}")
    engine = PlayedEngine()
    with openai_server(engine, folder) as url:
        server = Running(url, engine)
        assert ask(server, reasoning={"effort": "high", "summary": "auto"}) == "high: hi"
        chat = {"messages": [USER], "reasoning_effort": "low"}
        assert server.post("/v1/chat/completions", chat).status_code == 200
        assert bytes(engine.sent.input_token_ids) == b"low: hi"
        error = server.post(RESPONSES, {"input": "hi", "reasoning": {"effort": "great"}}).json()["error"]
        assert (error["param"], "reasoning.effort must be one of" in error["message"]) == ("reasoning.effort", True)
    error = running.post(RESPONSES, {"input": "hi", "reasoning": {"effort": "high"}}).json()["error"]
    assert error["param"] == "reasoning.effort"
    assert error["message"].startswith("reasoning.effort is not supported: the checkpoint's chat template")


def test_what_a_call_was_cut_in_cannot_be_continued(thinking: Running) -> None:
    thinking.engine.script = say('<tool_call>{"name": "ping", "arguments": {"a": 1}}</tool_call>')
    cut = thinking.post(RESPONSES, {"input": "hi", "tools": [PING], "max_output_tokens": 45}).json()
    assert cut["output"][0]["status"] == "incomplete"
    error = thinking.post(RESPONSES, {"input": "?", "previous_response_id": cut["id"]}).json()["error"]
    assert error["param"] == "previous_response_id"
    assert "cut within a function call" in error["message"]


TABLE = [
    # body, param, a part of the message
    ({"input": None}, "input", "Expected"),
    ({"input": []}, "input", "empty"),
    ({"input": [7]}, "input[0]", "Expected `object`"),
    ({"wrong": 1}, "wrong", "Unrecognized request argument"),
    ({"stop": "x"}, "stop", "Unrecognized request argument"),
    ({"n": 2}, "n", "Unrecognized request argument"),
    ({"input": [{**USER, "name": "x"}]}, "input[0].name", "Unrecognized"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "robot"),
    ({"input": [{"role": "user"}]}, "input[0].content", "Missing"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "computer_call is none of message, function_call"),
    ({"input": [{"type": ["a"]}]}, "input[0].type", "none of"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url", "Missing"),
    (
        {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "data:;base64,AA=="}]}]},
        "input[0].content[0].type",
        "is no text",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:;base64,AA=="}]}]},
        "input",
        "this model reads text alone",
    ),
    ({"input": [{**call("1", "Rome"), "arguments": "{"}]}, "input[0].arguments", "JSON object"),
    ({"input": [{**call("1", "Rome"), "arguments": "7"}]}, "input[0].arguments", "JSON object"),
    ({"input": [{**call("1", "Rome"), "call_id": None}]}, "input[0].call_id", "Expected"),
    (
        {"input": [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}]},
        "input[0].encrypted_content",
        "only the service that has encrypted it",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_output_tokens": 600}, "max_output_tokens", "maximum context length"),
    ({"input": "x" * 5000}, "input", "maximum context length"),
    ({"temperature": -1}, "temperature", "between 0 and 2"),
    ({"include": ["web_search_call.results"]}, "include", "may hold"),
    ({"top_logprobs": 3}, "top_logprobs", "include"),
    ({"top_logprobs": 21, "include": [fields.LOG_PROBS]}, "top_logprobs", "between 0 and 20"),
    ({"stream_options": {}}, "stream_options", "stream is true"),
    ({"metadata": {str(number): "a" for number in range(17)}}, "metadata", "16 keys"),
    ({"metadata": {"a": "b" * 513}}, "metadata", "512"),
    ({"metadata": {"a": 1}}, "metadata", "Expected `str`"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search is no function: this engine runs no tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "Missing"),
    ({"tools": [{**PING, "defer_loading": True}]}, "tools[0].defer_loading", "Unrecognized"),
    ({"tools": [{**PING, "name": "a b"}]}, "tools", "letters"),
    ({"tools": [PING]}, "tool_choice", "tool_parser"),
    ({"tool_choice": "required"}, "tool_choice", "tools are specified"),
    ({"tools": [PING], "tool_choice": "always"}, "tool_choice", "one of none, auto, required"),
    ({"tools": [PING], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice", "does not have it"),
    ({"tools": [PING], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "mcp is no function"),
    ({"tools": [PING], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode", "Missing"),
    ({"tools": [PING], "tool_choice": allowed("pong")}, "tool_choice", "allows the tool pong, which is not in tools"),
    ({"tools": [PING], "tool_choice": allowed()}, "tool_choice", "tool_choice.tools is empty"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "yaml"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "needs a name and a schema"),
    ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format", "no other fields"),
    (
        {"text": {"format": {"type": "json_object"}}, "tools": [PING], "tool_choice": "required"},
        "tool_choice",
        "text.format and tool_choice are two grammars",
    ),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "mood"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "Previous response with id 'resp_1' not found."),
    ({"model": "gpt-5"}, "model", "does not exist"),
]


@pytest.mark.parametrize(("body", "param", "words"), TABLE)
def test_a_wrong_body_is_refused_in_openais_form(
    running: Running, body: dict[str, Any], param: str, words: str
) -> None:
    running.engine.requests.clear()
    response = running.post(RESPONSES, {"input": "hi", **body})
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert (error["param"], error["type"] in ("invalid_request_error", "not_found_error")) == (param, True), error
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert running.engine.requests == []


def test_log_probabilities_are_of_text_alone(thinking: Running) -> None:
    error = thinking.post(RESPONSES, {"input": "hi", "include": [fields.LOG_PROBS]}).json()["error"]
    assert error["param"] == "include"
    assert "reasoning_parser" in error["message"]
    assert thinking.post(RESPONSES, {"input": "hi", "include": [fields.ENCRYPTED_REASONING]}).status_code == 200


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_each_refused_field_is_refused_by_name_and_null_is_not(running: Running, path: str) -> None:
    def body(value: object) -> dict[str, Any]:
        outer, _, inner = path.partition(".")
        return {"input": "hi", "stream": True, outer: {inner: value} if inner else value}

    for harmless in (None, *REFUSED[path][0]):
        assert running.post(RESPONSES, body(harmless)).status_code == 200, harmless
    values = [value for value in ("x", True, {"a": 1}) if _is_read(body(value))]
    error = running.post(RESPONSES, body(values[0])).json()["error"]
    assert (error["param"], error["code"]) == (path, "unsupported_parameter"), error


def _is_read(body: dict[str, Any]) -> bool:
    try:
        msgspec.convert(body, ResponseBody)
    except msgspec.ValidationError:
        return False
    return True


def test_every_field_is_honoured_or_refused_or_known_to_be_unused() -> None:
    """Those that all bodies have are read where chats are."""
    folder = Path(fields.__file__).parent
    code = "\n".join(path.read_text() for path in folder.glob("*.py"))
    outer = {path.partition(".")[0] for path in REFUSED}
    names = {*ResponseBody.__struct_fields__} - {*TextBody.__struct_fields__} - outer - {*ACCEPTED_UNUSED}
    assert [name for name in sorted(names) if f"body.{name}" not in code] == []


@pytest.mark.parametrize("depth", [100, 500, 900, 960, 990, 1100, 5000])
@pytest.mark.parametrize("place", ["tools", "format", "input", "arguments"])
def test_what_is_deep_is_the_requests_error(running: Running, depth: int, place: str) -> None:
    deep = '{"a":' * depth + "{}" + "}" * depth
    tool = f'{{"type": "function", "name": "f", "parameters": {deep}}}'
    form = f'{{"type": "json_schema", "name": "f", "schema": {deep}}}'
    part = f'{{"type": "output_text", "text": "a", "annotations": [{deep}]}}'
    bodies = {
        "tools": f'{{"input": "hi", "tool_choice": "none", "tools": [{tool}]}}',
        "format": f'{{"input": "hi", "text": {{"format": {form}}}}}',
        "input": f'{{"input": [{{"role": "user", "content": [{part}]}}]}}',
        "arguments": json.dumps({"input": [{**call("1", "Rome"), "arguments": deep}]}),
    }
    for end in ("}", ', "stream": true}'):
        assert running.post(RESPONSES, (bodies[place][:-1] + end).encode()).status_code in (200, 400)
