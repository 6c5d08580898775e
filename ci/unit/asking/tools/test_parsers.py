"""The parsers of all families: calls are found in any pieces, and what is no call is content."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_syntaxes import WRITINGS, parser_of, tame, written

from inflight.asking.tools.call_machine import MAX_HELD_CHARS, CallMachine
from inflight.asking.tools.events import Content, Event, ToolCallArguments, ToolCallStarted
from inflight.asking.tools.parser import make_tool_parser
from inflight.asking.tools.tool import Tool
from inflight.errors import ConfigurationError

TOOLS = [Tool(name="get_weather"), Tool(name="search-web"), Tool(name="f")]
FAMILIES = sorted(WRITINGS)
"""And the ways of writing within them."""

Call = tuple[str, dict[str, Any]]

NAMES = st.sampled_from([tool.name for tool in TOOLS])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.text("abz_", min_size=1, max_size=4)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=2)), min_size=1, max_size=3)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", '{"name": "f", ', '"arguments": {', '"parameters": {"a": ', '{"name": "nobody"', "f", "[f(", "f(a=",
    "[", "]", "{", "}", ", ", "; ", "'", '"', "\\", "=", "(", ")", " ", "\n", "1", "True", "null", "<", "text",
]  # fmt: skip
WRITTEN = st.builds(lambda family, calls: written(family, tame(family, calls)), st.sampled_from(FAMILIES), CALLS)
TEXTS = st.text() | st.lists(st.sampled_from(FRAGMENTS) | WRITTEN | st.text(max_size=5), max_size=12).map("".join)
UNITS = [
    "<tool_call>", '<tool_call>{"name": "f", "arguments": {', "<tool_call>{", "[TOOL_CALLS]", "[", "{",
    "<|python_tag|>",
    '{"arguments": {"a": "', "[f(a=", "; ", " ", '[{"name":', "<", '[TOOL_CALLS]f[ARGS]{"a":1}', "'", "\\",
]  # fmt: skip
"""Repeated, they are texts that invite reading again and again, or holding all."""
CUTS = st.lists(st.integers(0, 300), max_size=12)


def parser(family: str) -> CallMachine:
    numbers = itertools.count()
    machine = make_tool_parser(parser_of(family), TOOLS, lambda: f"id-{next(numbers)}")
    assert isinstance(machine, CallMachine)
    return machine


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    edges = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbours of the same kind as one, so that only what they say counts."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and event.index == last.index:
            found[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found


def parse(family: str, text: str, cuts: Iterable[int] = ()) -> list[Event]:
    machine = parser(family)
    events = [event for piece in pieces(text, cuts) for event in machine.feed(piece)]
    return joined([*events, *machine.finish()])


def calls_of(events: list[Event]) -> list[Call]:
    arguments = {event.index: event.text for event in events if isinstance(event, ToolCallArguments)}
    starts = [event for event in events if isinstance(event, ToolCallStarted)]
    assert [start.index for start in starts] == list(range(len(starts)))
    return [(start.name, json.loads(arguments[start.index])) for start in starts]


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def _fitting(family: str, calls: list[Call]) -> list[Call]:
    """Such calls as the family can write: InternLM calls one tool at a time."""
    return tame(family, calls[:1] if family == "internlm" else calls)


every_family = pytest.mark.parametrize("family", FAMILIES)
some_texts = settings(max_examples=15)
"""For each of the families."""


@every_family
@some_texts
@given(calls=CALLS, cuts=CUTS)
def test_the_calls_that_a_model_writes_come_out(family: str, calls: list[Call], cuts: list[int]) -> None:
    calls = _fitting(family, calls)
    events = parse(family, written(family, calls), cuts)
    assert calls_of(events) == calls
    assert content_of(events) == ""


@every_family
@some_texts
@given(text=TEXTS, cuts=CUTS)
def test_pieces_do_not_matter(family: str, text: str, cuts: list[int]) -> None:
    assert parse(family, text, cuts) == parse(family, text)
    assert parse(family, text, range(len(text))) == parse(family, text)


@every_family
@some_texts
@given(text=st.text(alphabet=st.characters(exclude_characters="<[{")))
def test_text_without_calls_comes_out_as_it_went_in(family: str, text: str) -> None:
    machine = parser(family)
    assert content_of([*machine.feed(text), *machine.finish()]) == text


@every_family
@some_texts
@given(text=TEXTS)
def test_a_text_in_which_no_call_begins_is_all_content(family: str, text: str) -> None:
    events = parse(family, text)
    if not any(isinstance(event, ToolCallStarted) for event in events):
        assert content_of(events) == text


@every_family
@some_texts
@given(calls=CALLS, length=st.integers(0, 200))
def test_a_broken_off_text_has_no_call_that_it_does_not_begin(family: str, calls: list[Call], length: int) -> None:
    text = written(family, _fitting(family, calls))[:length]
    names = [event.name for event in parse(family, text) if isinstance(event, ToolCallStarted)]
    assert names == [name for name, _ in calls[: len(names)]]


@every_family
def test_a_name_is_whole_before_its_arguments_and_both_come_early(family: str) -> None:
    text = written(family, [("get_weather", {"city": "Paris in May", "days": 3})])
    machine = parser(family)
    flat = [event for char in text for event in machine.feed(char)]
    assert isinstance(flat[0], ToolCallStarted) and flat[0].name == "get_weather"
    assert len([event for event in flat if isinstance(event, ToolCallArguments)]) > len("Paris")
    assert all(len(event.text) <= len(', "days": ') for event in flat if isinstance(event, ToolCallArguments))


@every_family
def test_a_tool_that_was_not_offered_is_content(family: str) -> None:
    text = written(family, [("rm", {"path": "/"})])
    assert parse(family, text) == [Content(text)]


@pytest.mark.parametrize("family", [family for family in FAMILIES if not WRITINGS[family].argument])
def test_a_value_that_is_none_ends_the_call_and_the_rest_is_content(family: str) -> None:
    text = written(family, [("f", {"a": 17})]).replace("17", "17oops")
    events = parse(family, text)
    assert isinstance(events[0], ToolCallStarted)
    assert isinstance(events[1], ToolCallArguments) and events[1].text.strip() in ('{"a":',)
    assert content_of(events).startswith("17oops")


@every_family
@pytest.mark.parametrize("unit", UNITS)
def test_the_work_is_linear_in_the_text_and_what_is_held_is_bounded(family: str, unit: str) -> None:
    def steps(num_chars: int) -> int:
        """Calls of functions of the parser, and what it holds."""
        machine = parser(family)
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(note)
        try:
            machine.feed(unit * (num_chars // len(unit)))
        finally:
            sys.setprofile(None)
        assert machine._num_held + len(machine._unread) <= MAX_HELD_CHARS + 64
        return count

    assert steps(80_000) <= 2.2 * steps(40_000) + 1000


def test_hermes_keeps_text_around_calls() -> None:
    text = 'Let me see.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone.'
    assert parse("hermes", text) == [
        Content("Let me see.\n"),
        ToolCallStarted(0, "id-0", "f"),
        ToolCallArguments(0, "{}"),
        Content("\nDone."),
    ]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}'),
        ("hermes", '\n\n<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>\n'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
        ("hermes", '<tool_call>{"type": "function", "name": "f", "arguments": {"a": 1}, "x": [1, "y"]}</tool_call>'),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
        ("llama3_json", '{"type": "function", "name": "f", "arguments": {"a": 1}}'),
        ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>"),
        ("pythonic", "[ f( a = 1, ) ]\n"),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"),
        ("granite", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]'),
        ("olmo3", "<function_calls>\nf(a=1)\n</function_calls>"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'),
        ("mistral", '[TOOL_CALLS]f{"a": 1}'),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]A1b2C3d4E[ARGS]{"a": 1}'),
        ("json", ' [{"name": "f", "parameters": {"a": 1}}]\n'),
    ],
)
def test_what_models_write_too(family: str, text: str) -> None:
    events = parse(family, text)
    assert calls_of(events) == [("f", {"a": 1})]
    assert content_of(events) == ""


@pytest.mark.parametrize(
    ("quoted", "written", "rest"),
    [
        ('{\\"a\\": \\"\\\\n \\ud83d\\ude00\\"}"}</tool_call>', '{"a": "\\n 😀"}', ""),
        (' {\\"a\\": 1} "}</tool_call> end', '{"a": 1}', " end"),
        ('{\\"a\\": 17oops}"}', '{"a":', '17oops}"}'),
        ('{\\"a\\": 1} 2"}', '{"a": 1}', '2"}'),
        ('{\\"a\\": \\"b', '{"a": "b', ""),
    ],
)
def test_arguments_that_are_a_json_text_are_the_object_in_it(quoted: str, written: str, rest: str) -> None:
    text = '<tool_call>{"name": "f", "arguments": "' + quoted
    for cuts in ((), range(len(text))):
        events = parse("granite4", text, cuts)
        arguments = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
        assert (arguments.strip(), content_of(events)) == (written, rest)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>none</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'),
        ("llama3_json", 'I call {"name": "rm", "parameters": {}}'),
        ("llama3_json", '{"answer": 42, "name": "f", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("pythonic", "[f(x)]"),
        ("phi4_mini_json", "import functools [see]"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<param"),
        ("glm45", "<tool_call>rm<arg_key>a</arg_key>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f"),
        ("gemma4", "<|tool_call>call:f(a:1)"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "I call [f(a=1)]"),
        ("mistral", '[{"name": "f", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS][]"),
        ("json", '{"name": "f", "parameters": {}}'),
    ],
)
def test_what_looks_like_a_call_and_is_none(family: str, text: str) -> None:
    assert parse(family, text) == [Content(text)]


def test_only_what_may_begin_a_tag_is_held_back() -> None:
    machine = parser("hermes")
    assert machine.feed("a < b <tool") == [Content("a < b ")]
    assert machine.feed("box>") == [Content("<toolbox>")]


def test_a_call_that_is_not_certain_is_held_up_to_a_bound() -> None:
    begin = '<tool_call>{"arguments": {"a": "'
    fits = MAX_HELD_CHARS - len(begin) - 100
    end = '"}, "name": "f"}</tool_call>'
    assert calls_of(parse("hermes", begin + "x" * fits + end)) == [("f", {"a": "x" * fits})]
    text = begin + "x" * MAX_HELD_CHARS + end
    assert content_of(parse("hermes", text, range(0, len(text), 1000))) == text


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    text = '<tool_call>{"name": "f", oops}</tool_call> <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    events = parse("hermes", text)
    assert calls_of(events) == [("f", {})]
    assert content_of(events) == '<tool_call>{"name": "f", oops}</tool_call> '


def test_ids_are_new_and_mistrals_have_nine_characters() -> None:
    for family, length in (("hermes", 29), ("mistral", 9)):
        machine = make_tool_parser(parser_of(family), TOOLS)
        events = machine.feed(written(family, [("f", {}), ("f", {})]))
        ids = {event.id for event in events if isinstance(event, ToolCallStarted)}
        assert len(ids) == 2 and {len(id_) for id_ in ids} == {length}


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="there is no tool parser nope: choose one of hermes, "):
        make_tool_parser("nope", TOOLS)
