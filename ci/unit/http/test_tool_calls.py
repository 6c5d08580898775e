"""Tools of a chat: what reaches the model, and which calls come back, whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from chat_templates import SHAPES
from fake_tokenizer import byte_tokenizer_with
from msgspec import structs
from openai_server import CHATS, PlayedEngine, Running, checkpoint_folder, openai_server, result, say

from inflight.asking.reasoning import REASONING_STYLES
from inflight.asking.tool_use import choose_tool_parser
from inflight.asking.tools.chosen_guide import chosen_call_guide
from inflight.asking.tools.families import NAMES
from inflight.asking.tools.guide import forced_call_guide
from inflight.asking.tools.tool import Tool
from inflight.errors import ConfigurationError
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.openai_options import REASONING_PARSERS, TOOL_PARSERS, OpenAIOptions
from inflight.result import FinishReason

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
CHAT: dict[str, Any] = {"messages": MESSAGES, "tools": [WEATHER]}
STRICT_WEATHER = Tool(name="weather", parameters=WEATHER["function"]["parameters"], strict=True)
NAMED = {"type": "function", "function": {"name": "weather"}}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OSLO = ROME.replace("Rome", "Oslo")
FORCED_ROME = '[{"name": "weather", "parameters": {"city": "Rome"}}]'
ARGUMENTS = '{"city": "Rome"}'


@pytest.fixture(scope="module")
def parsing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Its model writes as Hermes does."""
    engine = PlayedEngine()
    folder = checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))
    with openai_server(engine, folder, tool_parser="hermes") as url:
        yield Running(url, engine)


@pytest.fixture
def parsing(parsing_server: Running) -> Running:
    parsing_server.engine.script = say()
    return parsing_server


@pytest.fixture(scope="module")
def client(parsing_server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{parsing_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


def sent_guide(running: Running) -> GuidedDecodingParams:
    """As it was before its translation."""
    guide = running.engine.sent.guided_decoding_params
    assert guide is not None and guide.grammar
    return structs.replace(guide, grammar="")


def ask(running: Running, **body: Any) -> dict[str, Any]:
    response = running.post(CHATS, {**CHAT, **body})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def error(running: Running, **body: Any) -> tuple[str, str]:
    """The parameter and the message of a refusal."""
    response = running.post(CHATS, {**CHAT, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["message"]


def test_a_call_of_a_model_that_may_choose(parsing: Running, client: openai.OpenAI) -> None:
    parsing.engine.script = say("I look. " + ROME + OSLO)
    choice = client.chat.completions.create(model="llm", **CHAT).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look. "
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", "weather", ARGUMENTS),
        ("function", "weather", ARGUMENTS.replace("Rome", "Oslo")),
    ]
    assert len({call.id for call in calls}) == 2


def test_the_content_of_calls_alone_is_null(parsing: Running) -> None:
    parsing.engine.script = say(ROME)
    assert ask(parsing)["message"]["content"] is None
    parsing.engine.script = say("Sunny.")
    choice = ask(parsing)
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "Sunny."}, "stop")


def test_the_deltas_of_a_call(parsing: Running) -> None:
    parsing.engine.script = say("Hm " + ROME)
    *events, done = parsing.events(CHATS, {**CHAT, "n": 2})
    assert done == "[DONE]"
    for index in range(2):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        deltas = [choice["delta"] for choice in mine]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "Hm "
        first, *later = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert first == {
            "index": 0,
            "id": first["id"],
            "type": "function",
            "function": {"name": "weather", "arguments": ""},
        }
        assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in later)
        assert "".join(call["function"]["arguments"] for call in later) == ARGUMENTS
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["tool_calls"]


def test_the_sdk_joins_a_stream(parsing: Running, client: openai.OpenAI) -> None:
    parsing.engine.script = say(ROME + OSLO)
    with client.chat.completions.stream(model="llm", messages=MESSAGES) as stream:
        assert stream.get_final_completion().choices[0].message.content == ROME + OSLO

    class Weather(pydantic.BaseModel):
        city: str

    parsing.engine.script = say(FORCED_ROME.replace("weather", "Weather"))
    tool = openai.pydantic_function_tool(Weather)
    with client.chat.completions.stream(model="llm", messages=MESSAGES, tools=[tool], tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.parsed_arguments == Weather(city="Rome")


def test_without_parallel_calls_the_first_is_kept(parsing: Running) -> None:
    parsing.engine.script = say(ROME + OSLO)
    (call,) = ask(parsing, parallel_tool_calls=False)["message"]["tool_calls"]
    assert call["function"]["arguments"] == ARGUMENTS
    events = parsing.events(CHATS, {**CHAT, "parallel_tool_calls": False})[:-1]
    found = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert {call["index"] for call in found} == {0}


def test_a_cut_answer_says_so(parsing: Running) -> None:
    parsing.engine.script = say(ROME)
    choice = ask(parsing, max_tokens=len(ROME) - 20)
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])
    events = parsing.events(CHATS, {**CHAT, "max_tokens": len(ROME) - 20})
    assert events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("stop", "reason"), [("Rom", "stop"), ("}}", "stop"), ("}\n", "tool_calls"), ("</tool", "tool_calls")]
)
def test_a_stop_string_within_a_call_is_no_reason_to_call(parsing: Running, stop: str, reason: str) -> None:
    parsing.engine.script = say(ROME)
    choice = ask(parsing, stop=stop)
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert (arguments == ARGUMENTS) is (reason == "tool_calls")


def test_the_template_gets_the_tools_and_the_calls_before(parsing: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    ask(parsing, messages=messages)
    tools = json.dumps([WEATHER])
    prompt = f"tools: {tools}\nuser: hi\nassistant: weather{ARGUMENTS}\ntool: sunny\nassistant: "
    assert bytes(parsing.engine.sent.input_token_ids).decode() == prompt
    assert parsing.engine.sent.guided_decoding_params is None
    body = {"messages": messages, "tools": [WEATHER], "add_generation_prompt": True}
    assert parsing.post("/tokenize", body).json()["tokens"] == [*prompt.encode()]


def test_none_calls_nothing(running: Running) -> None:
    running.engine.script = say(ROME)
    choice = ask(running, tool_choice="none")
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": ROME}, "stop")
    assert bytes(running.engine.sent.input_token_ids).startswith(b"tools: ")


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_forced_calls_need_no_parser(running: Running, choice: Any, reason: str) -> None:
    running.engine.script = say(FORCED_ROME)
    answer = ask(running, tool_choice=choice)
    guide = running.engine.sent.guided_decoding_params
    assert guide is not None
    assert json.loads(guide.guide)["format"]["content"]["stop_after_first"] is (choice is NAMED)
    assert answer["message"]["content"] is None
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert answer["finish_reason"] == reason
    cut = ask(running, tool_choice=choice, max_tokens=len(FORCED_ROME) - 5)
    assert cut["finish_reason"] == "length"
    running.engine.script = say(FORCED_ROME[:-1] + ", " + FORCED_ROME[1:])
    cut = ask(running, tool_choice=choice, max_tokens=len(FORCED_ROME) + 12)
    assert (len(cut["message"]["tool_calls"]), cut["message"]["content"]) == (1, None)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "text", "found"),
    [
        (NAMED, "[", [("weather", "")]),
        (NAMED, '[{"name": "we', [("weather", "")]),
        ("required", "[", []),
        ("required", '[{"name": "we', []),
        ("required", '[{"name": "weather", "param', [("weather", "")]),
        ("required", '[{"name": "weather", "parameters": {"city": "Ro', [("weather", '{"city": "Ro')]),
        ("required", FORCED_ROME[:-1] + ', {"na', [("weather", ARGUMENTS)]),
        ("required", FORCED_ROME[:-1] + ', {"name": "time", ', [("weather", ARGUMENTS), ("time", "")]),
    ],
)
def test_a_forced_call_that_is_cut_returns_what_it_has(
    running: Running, choice: Any, text: str, found: list[tuple[str, str]], is_streamed: bool
) -> None:
    running.engine.script = say(text)
    body = {"tools": [WEATHER, TIME], "tool_choice": choice, "max_tokens": len(text)}
    if is_streamed:
        *events, _ = running.events(CHATS, {**CHAT, **body})
        chunks = [event["choices"][0] for event in events]
        parts = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
        started = [call for call in parts if "id" in call]
        assert [call["index"] for call in started] == [*range(len(found))]
        for index, (name, arguments) in enumerate(found):
            mine = [call["function"] for call in parts if call["index"] == index]
            assert mine[0]["name"] == name
            assert "".join(each["arguments"] for each in mine) == arguments
        assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == ""
        return
    answer = ask(running, **body)
    calls = [call["function"] for call in answer["message"].get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == found
    assert answer["finish_reason"] == "length" and not answer["message"]["content"]


def test_what_a_forced_calls_schema_says_beyond_a_grammar_is_refused_or_named(running: Running) -> None:
    """As the tool is strict or not."""
    cities = {"city": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}
    tool = {**WEATHER, "function": {"name": "weather", "parameters": {"type": "object", "properties": cities}}}
    param, message = error(running, tools=[strict(tool)], tool_choice="required")
    assert param == "tool_choice" and "uniqueItems" in message
    running.engine.script = say('[{"name": "weather", "parameters": {"city": ["a", "a"]}}]')
    response = running.post(CHATS, {**CHAT, "tools": [tool], "tool_choice": "required"})
    (left_out,) = response.json()["guide_not_enforced"]
    assert left_out["keyword"] == "uniqueItems" and left_out["pointer"].endswith("/properties/city")
    assert "uniqueItems" in response.headers["inflight-guide-not-enforced"]


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


def test_of_allowed_tools_alone_some_are_called_and_the_model_is_told_of_all(
    parsing: Running, client: openai.OpenAI
) -> None:
    parsing.engine.script = say(ROME)
    body: dict[str, Any] = {"messages": MESSAGES, "tools": [WEATHER, TIME]}
    choice = client.chat.completions.create(model="llm", **body, tool_choice=allowed("weather")).choices[0]
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("tool_calls", 1)
    assert sent_guide(parsing) == chosen_call_guide("hermes", [structs.replace(STRICT_WEATHER, strict=False)])
    assert json.dumps([WEATHER, TIME]) in bytes(parsing.engine.sent.input_token_ids).decode()
    assert ask(parsing, **body, tool_choice=allowed("time"))["message"]["content"] == ROME
    assert ask(parsing, **body, tool_choice=allowed("time", "weather"))["finish_reason"] == "tool_calls"
    assert parsing.engine.sent.guided_decoding_params is None


def test_one_of_the_allowed_tools_may_be_required(running: Running) -> None:
    running.engine.script = say(FORCED_ROME)
    answer = ask(running, tools=[WEATHER, TIME], tool_choice=allowed("weather", mode="required"))
    assert answer["finish_reason"] == "tool_calls"
    assert sent_guide(running) == forced_call_guide([structs.replace(STRICT_WEATHER, strict=False)])


def test_a_strict_tool_has_a_grammar_where_the_model_may_choose(parsing: Running) -> None:
    parsing.engine.script = say("I look. " + ROME)
    choice = ask(parsing, tools=[strict(WEATHER)])
    assert sent_guide(parsing) == chosen_call_guide("hermes", [STRICT_WEATHER])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look. ", "tool_calls")
    ask(parsing, tools=[strict(WEATHER)], parallel_tool_calls=False)
    assert sent_guide(parsing) == chosen_call_guide("hermes", [STRICT_WEATHER], parallel_tool_calls=False)
    ask(parsing, tools=[strict(WEATHER)], tool_choice="none")
    assert parsing.engine.sent.guided_decoding_params is None


def test_the_sdks_models_of_tools_and_of_the_answer(parsing: Running, client: openai.OpenAI) -> None:
    """`parse` sends tools of pydantic models as strict ones, and calls or answers come back as these models."""

    class Weather(pydantic.BaseModel):
        city: str

    class Report(pydantic.BaseModel):
        is_sunny: bool

    options: dict[str, Any] = {"tools": [openai.pydantic_function_tool(Weather)], "response_format": Report}
    parsing.engine.script = say(ROME.replace("weather", "Weather"))
    message = client.chat.completions.parse(model="llm", messages=MESSAGES, **options).choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == Weather(city="Rome")
    assert '"is_sunny"' in sent_guide(parsing).guide and '"Weather' in sent_guide(parsing).guide
    with client.chat.completions.stream(model="llm", messages=MESSAGES, **options) as stream:
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls[0].function.parsed_arguments == Weather(city="Rome")
    parsing.engine.script = say('{"is_sunny": true}')
    message = client.chat.completions.parse(model="llm", messages=MESSAGES, **options).choices[0].message
    assert (message.parsed, message.tool_calls) == (Report(is_sunny=True), None)
    del options["tools"]
    client.chat.completions.parse(model="llm", messages=MESSAGES, **options)
    assert sent_guide(parsing).guide_type is GuideType.JSON_SCHEMA


def test_a_call_may_stand_instead_of_a_json_object(parsing: Running) -> None:
    parsing.engine.script = say(ROME)
    assert ask(parsing, response_format={"type": "json_object"})["finish_reason"] == "tool_calls"
    assert sent_guide(parsing).guide_type is GuideType.STRUCTURAL_TAG


def test_ids_are_what_the_family_takes(tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = PlayedEngine(say(FORCED_ROME))
    with openai_server(engine, checkpoint_folder(tmp_path_factory.mktemp("it")), tool_parser="mistral") as url:
        running = Running(url, engine)
        forced = ask(running, tool_choice="required")["message"]["tool_calls"][0]["id"]
        engine.script = say("[TOOL_CALLS]weather[ARGS]" + ARGUMENTS)
        chosen = ask(running)["message"]["tool_calls"][0]["id"]
    for each in (forced, chosen):
        assert len(each) == 9
        assert each.isalnum()


def test_tags_that_are_special_tokens_are_read_and_others_stay_hidden(tmp_path: Path) -> None:
    tags = ["[TOOL_CALLS]", "[ARGS]", "<pad>"]
    tokenizer = byte_tokenizer_with(*tags)
    calls, args, pad = (tokenizer.encode(tag)[0] for tag in tags)
    ids = [*b"Hm", pad, calls, *b"weather", args, *ARGUMENTS.encode(), pad]
    engine = PlayedEngine(lambda request: [result(request, ids, finish=FinishReason.END_ID, is_final=True)])
    with openai_server(engine, checkpoint_folder(tmp_path), tokenizer=tokenizer, tool_parser="mistral") as url:
        choice = ask(Running(url, engine), tools=[strict(WEATHER)])
        assert sent_guide(Running(url, engine)) == structs.replace(
            chosen_call_guide("mistral", [STRICT_WEATHER], special_tokens=tags), shown_token_ids=(calls, args)
        )
        plain = ask(Running(url, engine), tools=None)
    assert choice["message"]["content"] == "Hm"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert plain["message"]["content"] == "Hmweather" + ARGUMENTS


def test_log_probabilities_are_those_of_all_tokens(parsing: Running) -> None:
    parsing.engine.script = say(ROME)
    events = parsing.events(CHATS, {**CHAT, "logprobs": True})[:-1]
    entries = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", ())]
    assert "".join(entry["token"] for entry in entries).startswith(ROME)


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_deep_parameters_are_the_requests_error(parsing: Running, choice: str) -> None:
    """Each depth around that of a body which can just be read: its guide is deeper."""
    for depth in (200, *range(950, 1000), 5000):
        deep = '{"a":' * depth + "{}" + "}" * depth
        tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"properties": {deep}}}}}}}]'
        body = f'{{"messages": {json.dumps(MESSAGES)}, "tools": {tools}, "tool_choice": "{choice}"}}'
        assert parsing.post(CHATS, body.encode()).status_code in (200, 400)


def test_a_template_of_no_known_family_leaves_the_choice_to_the_operator(running: Running) -> None:
    param, message = error(running)
    assert param == "tool_choice"
    assert "tool_parser" in message


def test_the_parser_is_that_of_the_templates_calls(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(SHAPES["Qwen3"].source)
    for setting, reason in (("", "tool_calls"), ("granite4", "tool_calls"), ("pythonic", "stop")):
        engine = PlayedEngine(say(ROME))
        with openai_server(engine, folder, tool_parser=setting) as url:
            assert ask(Running(url, engine))["finish_reason"] == reason


@pytest.mark.parametrize(
    ("asked", "families", "knows_tools", "parser", "words"),
    [
        (
            "",
            ["hermes"],
            True,
            "hermes",
            "calls of tools are read as hermes, as the chat template writes them; ",
        ),
        ("hermes", ["hermes"], True, "hermes", ""),
        (
            "mistral",
            ["hermes"],
            True,
            "mistral",
            "calls of tools as hermes, but --openai-set tool_parser is mis",
        ),
        ("mistral", [], True, "mistral", ""),
        (
            "",
            [],
            True,
            "",
            "the chat template writes calls of tools as no family that is known here; ",
        ),
        ("", ["hermes", "mistral"], True, "", "as each of hermes, mistral; --openai-set tool_parser=… names one"),
        ("", [], False, "", ""),
    ],
)
def test_the_operator_is_told_which_parser_follows_from_the_template(
    asked: str, families: list[str], knows_tools: bool, parser: str, words: str
) -> None:
    found, said = choose_tool_parser(asked, families, knows_tools=knows_tools)
    assert found == parser
    assert words in said and bool(words) is bool(said)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": []}, "tools", "empty"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing"),
        ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools[0].type", "custom"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice", "tools are specified"),
        ({"tool_choice": "always"}, "tool_choice", "one of none, auto, required"),
        ({"tool_choice": {"type": "custom", "name": "weather"}}, "tool_choice.type", "custom"),
        ({"tool_choice": allowed()}, "tool_choice", "tool_choice.allowed_tools.tools is empty"),
        ({"tool_choice": allowed("time")}, "tool_choice", "allows the tool time, which is not in tools"),
        ({"tool_choice": allowed("weather", mode="none")}, "tool_choice.allowed_tools.mode", "none"),
        ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", "does not have it"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "two grammars"),
        ({"tools": [strict(WEATHER)], "guided_regex": "a"}, "tools", "guided_regex and tools are two grammars"),
        ({"messages": [{"role": "assistant", "tool_calls": [7]}]}, "messages[0]", "functions with a name"),
    ],
)
def test_refusals(parsing: Running, body: dict[str, Any], param: str, words: str) -> None:
    found, message = error(parsing, **body)
    assert found == param
    assert words in message


def test_a_template_that_knows_no_tools(tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = PlayedEngine(say(FORCED_ROME))
    folder = checkpoint_folder(tmp_path_factory.mktemp("plain"))
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with openai_server(engine, folder) as url:
        running = Running(url, engine)
        assert error(running) == (
            "tools",
            "the checkpoint's chat template tells the model of no tools: use tool_choice required",
        )
        assert ask(running, tool_choice="required")["finish_reason"] == "tool_calls"


def test_the_settings_name_every_parser() -> None:
    assert TOOL_PARSERS == NAMES
    assert {*REASONING_PARSERS} == {*REASONING_STYLES}
    with pytest.raises(ConfigurationError, match=r"tool_parser must be one of hermes, .*, got nope"):
        OpenAIOptions().with_settings({"tool_parser": "nope"})
