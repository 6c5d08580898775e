"""The chat templates of public checkpoints' families: they render what clients send, as transformers would, and what
they tell the model of its calls is what the family's parser reads."""

from __future__ import annotations

import itertools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chat_templates import SHAPES, Shape

from inflight.asking.chat import Chat
from inflight.asking.chat_format import ChatFormat, ChatReader
from inflight.asking.chat_renderer import ChatRenderer
from inflight.asking.chat_template import ChatTemplate
from inflight.asking.reasoning import REASONING_STYLES, REASONING_TAGS
from inflight.asking.refusal import Refusal
from inflight.asking.template_habits import Habits
from inflight.asking.tools.events import Content, ToolCallArguments, ToolCallStarted
from inflight.asking.tools.parser import make_tool_parser
from inflight.asking.tools.tool import Tool
from inflight.http.dialects.messages import read_messages

CHECKPOINT = Path(__file__).resolve().parents[3] / "model_repository" / "llm" / "1" / "checkpoint"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = '{"city": "Sèvres", "days": 3, "exact": true}'
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How it is.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be short."}
ASKED = {"role": "user", "content": "How is it in Größe?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "call12345", "content": "sunny"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one question": ([ASKED], None),
    "a system message": ([SYSTEM, ASKED], None),
    "some turns": ([ASKED, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFine."}, ASKED], None),
    "tools": ([ASKED], TOOLS),
    "a call and its result": ([ASKED, CALLED, TOLD], TOOLS),
    "two calls": ([ASKED, {**CALLED, "tool_calls": [CALL, CALL]}, TOLD, TOLD], TOOLS),
    "two questions": ([ASKED, ASKED], None),
}

every_shape = pytest.mark.parametrize("name", SHAPES)


def renderer(shape: Shape) -> ChatRenderer:
    return ChatRenderer(ChatTemplate(shape.source, TOKENS), frozenset({"enable_thinking"}))


def chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any) -> Chat:
    offered = None if tools is None else [msgspec.convert(each["function"], Tool) for each in tools]
    return Chat(messages=read_messages(messages), tools=offered, **options)


def rendered(shape: Shape, messages: list[dict[str, Any]], **options: Any) -> str:
    return renderer(shape).render(chat(messages, **options))


@every_shape
def test_text_and_roles_are_there(name: str) -> None:
    shape = SHAPES[name]
    text = rendered(shape, [ASKED])
    assert ASKED["content"] in text
    assert len(rendered(shape, [ASKED], adds_generation_prompt=False)) <= len(text)
    parts = [{"type": "text", "text": "How is it"}, {"type": "text", "text": "in Größe?"}]
    assert "How is it\nin Größe?" in rendered(shape, [{"role": "user", "content": parts}])
    if shape.takes_system:
        for role in ("system", "developer"):
            assert "Be short." in rendered(shape, [{**SYSTEM, "role": role}, ASKED])
    else:
        with pytest.raises(Refusal, match="does not take these messages: System role not supported"):
            rendered(shape, [SYSTEM, ASKED])


@every_shape
def test_an_answer_can_be_continued(name: str) -> None:
    begun = [ASKED, {"role": "assistant", "content": "It is"}]
    assert rendered(SHAPES[name], begun, continues_final_message=True).endswith("It is")


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.parser])
def test_a_call_is_written_as_the_parser_reads_it(name: str) -> None:
    shape = SHAPES[name]
    text = rendered(shape, [ASKED, CALLED, TOLD], tools=TOOLS)
    assert "sunny" in text
    begin = text.index(shape.before_call, text.index("Größe?")) + len(shape.before_call)
    style = REASONING_STYLES.get(shape.reasoning)
    reader = ChatReader(
        ChatFormat(
            make_tool_parser=lambda: make_tool_parser(shape.parser, [Tool(name="weather")]),
            make_splitter=None if style is None else style.splitter_maker(""),
        )
    )
    events = [*reader.feed(text[begin : text.index(shape.behind_call, begin)]), *reader.finish()]
    assert [event.name for event in events if isinstance(event, ToolCallStarted)] == ["weather"]
    assert "".join(event.text for event in events if isinstance(event, ToolCallArguments)) == ARGUMENTS
    assert not any(isinstance(event, Content) for event in events)


@every_shape
def test_the_family_of_its_calls_is_found(name: str) -> None:
    shape = SHAPES[name]
    assert renderer(shape).tool_families == ([shape.parser] if shape.parser else [])


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.parser and shape.tells_tools])
def test_it_tells_of_tools(name: str) -> None:
    assert renderer(SHAPES[name]).knows_tools
    assert "How it is." in rendered(SHAPES[name], [ASKED], tools=TOOLS)
    assert "How it is." not in rendered(SHAPES[name], [ASKED])


def test_what_a_template_takes_is_found() -> None:
    found = {name: ChatTemplate(shape.source, TOKENS)._habits for name, shape in SHAPES.items()}
    assert found.pop("DeepSeek R1, distilled") == Habits(takes_null=True, takes_text=True)
    assert found.pop("content in parts alone") == Habits(takes_parts=True)
    assert found.pop("gpt-oss") == Habits(joins_thought=True)
    assert set(found.values()) == {Habits()}
    text = rendered(SHAPES["DeepSeek R1, distilled"], [ASKED, {**CALLED, "content": ""}, TOLD])
    assert f"weather\n```json\n{ARGUMENTS}\n```" in text


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("Gemma 2", [ASKED, ASKED], "roles must alternate"),
        ("Mistral, version 3", [ASKED, ASKED], "must alternate"),
        ("Mistral, version 3", [ASKED, {**CALLED, "tool_calls": [{**CALL, "id": "short"}]}, TOLD], "nine characters"),
        ("Llama 3.1", [ASKED, {**CALLED, "tool_calls": [CALL, CALL]}], "only one call at a time"),
    ],
)
def test_what_a_template_refuses_is_said_in_its_words(name: str, messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(Refusal, match=f"the chat template does not take these messages: .*{words}"):
        rendered(SHAPES[name], messages, tools=TOOLS)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.reasoning in REASONING_TAGS])
def test_reasoning_of_earlier_answers_and_of_the_next(name: str) -> None:
    shape = SHAPES[name]
    tags = REASONING_TAGS[shape.reasoning]
    text = rendered(shape, CONVERSATIONS["some turns"][0])
    assert "Hm." not in text and "Fine." in text
    assert text.rstrip().endswith(tags.opening) is (shape.reasoning == "deepseek_r1")
    if shape.reasoning == "qwen3":
        assert rendered(shape, [ASKED], template_kwargs={"enable_thinking": False}).rstrip().endswith(tags.closing)
        thought = {"role": "assistant", "content": None, "reasoning": "I look.", "tool_calls": [CALL]}
        assert "<think>\nI look.\n</think>\n\n<tool_call>" in rendered(shape, [ASKED, thought, TOLD], tools=TOOLS)


def test_a_thought_and_words_before_a_call_become_one_where_a_template_takes_one() -> None:
    spoken = {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [CALL]}
    text = rendered(SHAPES["gpt-oss"], [ASKED, spoken, TOLD], tools=TOOLS)
    assert "<|channel|>analysis<|message|>Hm.\nI look.<|end|><|start|>assistant to=functions.weather" in text


def test_the_date_is_todays() -> None:
    assert datetime.now().strftime("%b %Y") in rendered(SHAPES["Llama 3.1"], [ASKED])


def test_a_checkpoint_without_a_template_says_what_to_use() -> None:
    plain = ChatRenderer(None)
    with pytest.raises(Refusal, match="this checkpoint has no chat template: use /v1/completions"):
        plain.render(chat([ASKED]))


@pytest.mark.slow
def test_it_is_what_transformers_makes() -> None:
    """Of the same messages, in the form that the template takes; where one refuses them, the other does."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(CHECKPOINT), local_files_only=True)
    tokens = {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token}
    for (name, shape), (kind, (messages, tools)), generates in itertools.product(
        SHAPES.items(), CONVERSATIONS.items(), (True, False)
    ):
        template = ChatTemplate(shape.source, tokens)
        plain = [
            {**each, "content": each["content"] or ""}
            | ({"tool_calls": [_with_object(call) for call in each["tool_calls"]]} if "tool_calls" in each else {})
            for each in messages
        ]
        try:
            expected = theirs.apply_chat_template(
                template._habits.adapted(plain),
                chat_template=shape.source,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generates,
            )
        except Exception:
            expected = None
        try:
            found = template.render(plain, add_generation_prompt=generates, continue_final_message=False, tools=tools)
        except Refusal:
            found = None
        assert found == expected, (name, kind)


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
