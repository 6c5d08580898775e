"""Under tool_choice auto with strict tools, what a parser finds in a text that follows the grammar follows the tools'
schemas, for each family, and other text is free."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import xgrammar

from inflight.asking.tools.chosen_guide import chosen_call_guide
from inflight.asking.tools.events import Content, ToolCallArguments, ToolCallStarted
from inflight.asking.tools.parser import make_tool_parser
from inflight.asking.tools.tool import Tool
from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams

pytestmark = pytest.mark.slow  # the library imports torch

FEED = Tool(
    name="feed",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "animal": {"$ref": "#/$defs/animal"},
            "count": {"type": "integer", "minimum": 1, "maximum": 99},
            "gently": {"type": "boolean"},
        },
        "required": ["animal", "count"],
        "additionalProperties": False,
        "$defs": {"animal": {"type": "string", "enum": ["cat", "dog"]}},
    },
)
LOOSE = Tool(name="note", parameters={"type": "object", "properties": {"text": {"type": "string"}}})
STOP = Tool(name="stop", strict=True)
TOOLS = [FEED, LOOSE, STOP]
GOOD, BAD = '{"animal": "cat", "count": 3}', '{"animal": "cow", "count": 3}'
ANSWER = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}}

VOCABULARY = [*map(chr, range(32, 127)), "\n", "</s>"]
TAGS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "[TOOL_CALLS]", "[ARGS]"]
WORDS = [*VOCABULARY, *TAGS, '{"name": "feed", "', "feed", "note(", '[{"', "hello "]
END = VOCABULARY.index("</s>")
INFO = xgrammar.TokenizerInfo(WORDS, xgrammar.VocabType.RAW, stop_token_ids=[END])


def matcher(params: GuidedDecodingParams) -> xgrammar.GrammarMatcher:
    compiler = xgrammar.GrammarCompiler(INFO, cache_enabled=False)
    return xgrammar.GrammarMatcher(compiler.compile_structural_tag(params.guide))


def follows(params: GuidedDecodingParams, text: str) -> bool:
    """Whether the whole text does."""
    found = matcher(params)
    return bool(found.accept_string(text) and found.is_completed())


def read(family: str, text: str, **options: Any) -> tuple[list[tuple[str, Any]], str]:
    """The calls and the content that the family's parser finds."""
    parser = make_tool_parser(family, TOOLS, **options)
    events = [*parser.feed(text), *parser.finish()]
    names = [event.name for event in events if isinstance(event, ToolCallStarted)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, ToolCallArguments):
            arguments[event.index] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    return list(zip(names, map(json.loads, arguments), strict=True)), content


def is_valid(name: str, arguments: Any) -> bool:
    if name == "stop":
        return bool(arguments == {})
    if name == "note":
        return isinstance(arguments, dict)
    return (
        {"animal", "count"} <= arguments.keys() <= {"animal", "count", "gently"}
        and arguments["animal"] in ("cat", "dog")
        and 1 <= arguments["count"] <= 99
        and isinstance(arguments.get("gently", True), bool)
    )


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


CALLS: dict[str, tuple[tuple[str, ...], list[str], list[str]]] = {
    "hermes": (
        (),
        [f"Well. {hermes('feed', GOOD)}\n{hermes('note', BAD)} So.", hermes("stop", "{}")],
        [hermes("feed", BAD), "a <tool_call>", hermes("rm", "{}"), f"<<tool_call>{hermes('stop', '{}')}"],
    ),
    "llama3_json": (
        (),
        [
            f"{llama('feed', GOOD)}; {llama('note', BAD)}",
            f"<|python_tag|>{llama('feed', GOOD)}; {llama('stop', '{}')}",
            f"Well. <|python_tag|>{llama('feed', GOOD)}",
        ],
        [llama("feed", BAD), "{}", " {", f"a<|python_tag|>{llama('feed', BAD)}", f"{llama('stop', '{}')} So."],
    ),
    "pythonic": (
        (),
        [
            '[feed(animal="cat", count=3, gently=true), note(a=[1, {"b": null}], c="d"), stop()]',
            '<|python_start|>[feed(animal="dog", count=3)]<|python_end|>',
            "Well. <|python_start|>[stop()]<|python_end|>",
        ],
        ['[feed(animal="cow", count=3)]', "[1]", '[feed(count=3, animal="cat")]', "<|python_start|>[]", "[stop()] So."],
    ),
    "mistral": (
        (),
        [
            f"[TOOL_CALLS][{mistral('feed', GOOD)}, {mistral('note', BAD)}]",
            f"Well. [TOOL_CALLS] [{mistral('stop', '{}')}]",
        ],
        [f"[TOOL_CALLS][{mistral('feed', BAD)}]", "[TOOL_CALLS]", "[TOOL_CALLS][]", f"[TOOL_CALLS]feed[ARGS]{GOOD}"],
    ),
    "mistral, version 11": (
        ("[ARGS]", "[CALL_ID]"),
        [
            f"Well. [TOOL_CALLS]feed[ARGS]{GOOD}[TOOL_CALLS]note[ARGS]{BAD}",
            f"[TOOL_CALLS]feed[CALL_ID]abcdefgh1[ARGS]{GOOD}",
        ],
        [f"[TOOL_CALLS]feed[ARGS]{BAD}", f"[TOOL_CALLS][{mistral('stop', '{}')}]", f"[TOOL_CALLS]rm[ARGS]{GOOD}"],
    ),
}


def guide(name: str, **options: Any) -> GuidedDecodingParams:
    return chosen_call_guide(name.split(",")[0], TOOLS, special_tokens=CALLS[name][0], **options)


@pytest.mark.parametrize("name", CALLS)
def test_calls_follow_their_schemas_and_other_text_is_free(name: str) -> None:
    _, good, bad = CALLS[name]
    params, family = guide(name), name.split(",")[0]
    for text in (*good, "", "Hello.", "<b>bold</b> [a](b) {c}", "\n\n- one\n- two"):
        assert follows(params, text), text
    for text in bad:
        assert not follows(params, text), text
    for text in good:
        calls, content = read(family, text)
        assert calls and all(is_valid(*call) for call in calls), text
        assert set(content.split()) <= {"Well.", "So."}, content


@pytest.mark.parametrize("name", CALLS)
def test_whatever_a_parser_finds_is_whole_and_valid(name: str) -> None:
    """Random outputs, which like to begin calls."""
    family, num_calls = name.split(",")[0], 0
    eager = [WORDS.index(word) for word in (*TAGS, *"{[", '{"name": "feed", "', "feed", '[{"')]
    allowed = np.zeros((1, -(-len(WORDS) // 32)), dtype=np.int32)
    params = guide(name)
    for seed in range(40):
        choose, following, text = random.Random(seed), matcher(params), ""
        while len(text) < 400:
            following.fill_next_token_bitmask(allowed, 0)
            bits = np.unpackbits(allowed.view(np.uint8)[0], bitorder="little", count=len(WORDS))
            tokens = np.flatnonzero(bits).tolist()
            likely = [token for token in eager if token in tokens]
            token = choose.choice(likely if likely and choose.random() < 0.2 else tokens)
            assert following.accept_token(token)
            if token == END:
                break
            text += WORDS[token]
        else:
            continue  # it was cut
        calls, _ = read(family, text)
        num_calls += len(calls)
        assert all(is_valid(*call) for call in calls), text
    assert num_calls > 3


@pytest.mark.parametrize("name", CALLS)
def test_without_parallel_calls_there_is_one(name: str) -> None:
    params, family = guide(name, parallel_tool_calls=False), name.split(",")[0]
    for text in CALLS[name][1]:
        calls, content = read(family, text)
        assert follows(params, text) is (len(calls) == 1 and not content.endswith("So."))


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_may_have_a_form_of_its_own(name: str) -> None:
    params = guide(name, answer=ANSWER)
    assert follows(params, '{"ok": true}')
    assert not follows(params, "Hello.")
    texts = [text for text in CALLS[name][1] if "Well" not in text]
    assert texts and all(follows(params, text) for text in texts)
    family = name.split(",")[0]
    for text in texts:
        assert read(family, text, at_start_only=True) == read(family, text)
        within = json.dumps({"ok": text})
        assert read(family, within, at_start_only=True) == ([], within), "a part of an answer is no call"


def test_arguments_that_may_be_left_out_come_last_in_python() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}
    for required, good, bad in (
        ([], ["f()", "f(a=1)", "f(b=2, c=3)"], ["f(b=2, a=1)"]),
        (["b"], ["f(b=2)", "f(b=2, a=1, c=3)"], ["f()", "f(a=1, b=2)"]),
    ):
        tool = Tool(name="f", strict=True, parameters={"properties": properties, "required": required})
        params = chosen_call_guide("pythonic", [tool])
        assert all(follows(params, f"[{text}]") for text in good)
        assert not any(follows(params, f"[{text}]") for text in bad)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"first name": {}}}, "its parameter 'first name' is no name"),
        ({"properties": {}, "$ref": "#/$defs/x"}, "not all in properties"),
    ],
)
def test_what_python_cannot_write_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        chosen_call_guide("pythonic", [Tool(name="f", strict=True, parameters=parameters)])


def test_schemas_beyond_the_bounds_are_refused() -> None:
    tools = [Tool(name=f"f{index}", strict=True, parameters={"description": "x" * 1000}) for index in range(80)]
    with pytest.raises(InvalidRequest, match=r"a strict tool needs a grammar of \d+ bytes .*, more than 65536"):
        chosen_call_guide("hermes", tools)
