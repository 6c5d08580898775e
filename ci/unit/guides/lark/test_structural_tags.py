"""XGrammar's structural tags, held against XGrammar where it is right."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar
from grammar_acceptance import acceptance, xgrammar_takes

from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuideType

Form = dict[str, Any]
OBJECT = {"type": "json_schema", "json_schema": {"type": "object"}}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
FREE = {"type": "any_text"}
DIGIT = {"type": "regex", "pattern": "[0-9]"}


def text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Form, end: str | list[str]) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(kind: str, *elements: Form) -> Form:
    return {"type": kind, "elements": list(elements)}


def guide(form: Form) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


F = tag("<f=a>", OBJECT, "</f>")
G = tag("<f=b>", NUMBER, "</f>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [F, G]}
SEPARATED = {"type": "tags_with_separator", "tags": [F, G], "separator": ", "}
DISPATCH = {"type": "dispatch", "rules": [["<a>", DIGIT], ["[b]", text("!")]]}

CASES: dict[str, tuple[Form, list[str], list[str]]] = {
    "a text": (text('a"/\n\\é'), ['a"/\n\\é'], ["", "a"]),
    "a schema": (tag("<", OBJECT, ">"), ["<{}>", '<{"a": "<é>"}>'], ["<[]>", "<{}", "{}"]),
    "free text": (FREE, ["", "a\n<é"], []),
    "free text in a tag": (tag("<t>", FREE, "</t>"), ["<t></t>", "<t></</t>", "<t><t>é\n</t>"], ["<t>", "<t></t>x"]),
    "free text without some": ({**FREE, "excludes": ["ab", "c"]}, ["", "a", "ba", "aa"], ["ab", "xaab", "c"]),
    "several ends": (tag("(", FREE, ["]", ")"]), ["(a]", "()"], ["(", "(a]b)"]),
    "a regular expression": ({"type": "regex", "pattern": r"a\d{2}|b"}, ["a12", "b"], ["a1", ""]),
    "a grammar": ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "a"'}, ["a", "((a))"], ["(a", ""]),
    "two grammars": (
        of("sequence", *({"type": "grammar", "grammar": f'root ::= "(" root ")" | x\nx ::= "{x}"'} for x in "ab")),
        ["ab", "(a)((b))"],
        ["ba", "aa"],
    ),
    "a sequence": (of("sequence", text("a"), DIGIT, text("b")), ["a1b"], ["ab", "a1"]),
    "alternatives": (of("or", text("a"), text("ab"), of("sequence", text("x"), OBJECT)), ["a", "ab", "x{}"], ["x", ""]),
    "optional": ({"type": "optional", "content": text("a")}, ["", "a"], ["aa"]),
    "star": ({"type": "star", "content": F}, ["", "<f=a>{}</f>", "<f=a>{}</f>" * 3], ["<f=a>"]),
    "plus": ({"type": "plus", "content": text("a")}, ["a", "aa"], [""]),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": F}, ["<f=a>{}</f>", "<f=a>{}</f>" * 2], ["", "<"]),
    "repeat without an end": ({"type": "repeat", "min": 2, "max": -1, "content": text("a")}, ["aa", "aaaa"], ["a"]),
    "triggered": (
        TRIGGERED,
        ["", "hi", "<", "<<f", "<<f=a>{}</f>", 'x<f=b>12</f><f=a>{"a": 1}</f> bye<', "</f>", "<f=b>1</f><f"],
        ["<f=", "<f=c>", "<f=a>[]</f>", "x<f=b>12</f><f=a>"],
    ),
    "triggered, one at least": (
        {**TRIGGERED, "at_least_one": True},
        ["<f=a>{}</f>", "<f=b>1</f>x<f=a>{}</f>y"],
        ["", "x", "<f=c>"],
    ),
    "triggered, one": ({**TRIGGERED, "stop_after_first": True}, ["", "x", "a<f=b>1</f>"], ["<f=b>1</f>x"]),
    "triggered, exactly one": (
        {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
        ["<f=b>1</f>"],
        ["", "x<f=b>1</f>", "<f=b>1</f>x"],
    ),
    "triggered without some": ({**TRIGGERED, "excludes": ["bad"]}, ["ba", "<f=a>{}</f>ba"], ["bad", "<f=a>{}</f>bad"]),
    "triggered in a tag": (
        tag("<t>", TRIGGERED, "</t>"),
        ["<t></t>", "<t>x<f=b>1</f>y</t>", "<t><f=b>1</f></t>", "<t></f></t>"],
        ["<t>", "<t></t>x", "<t><f=</t>"],
    ),
    "separated": (SEPARATED, ["", "<f=a>{}</f>", "<f=a>{}</f>, <f=b>1</f>"], ["<f=a>{}</f>, ", "x", ", "]),
    "separated, one at least": ({**SEPARATED, "at_least_one": True}, ["<f=b>1</f>"], [""]),
    "separated, one": ({**SEPARATED, "stop_after_first": True}, ["", "<f=b>1</f>"], ["<f=b>1</f>, <f=b>1</f>"]),
    "dispatch": (DISPATCH, ["", "a<a>1b[b]!c", "<a", "<<a>1", "[[b]!"], ["<a>", "<a>x", "[b]"]),
    "dispatch, once": ({**DISPATCH, "loop": False}, ["", "a", "b<a>1"], ["<a>1b", "<a>"]),
    "dispatch without some": ({**DISPATCH, "excludes": ["no"]}, ["n", "<a>1n"], ["no", "<a>1no"]),
    "free text that ends itself": (
        of("sequence", {**FREE, "excludes": ["</think>"]}, text("</think>"), OBJECT),
        ["</think>{}", "a</</think>{}"],
        ["</think>", "{}", "a</think>b</think>{}"],
    ),
    "calls behind an answer": (
        of("sequence", {"type": "regex", "pattern": "[^{<]|<[^<|]"}, DISPATCH),
        ["a", "<b", "x<a>1"],
        ["{", "<<"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_format_takes_its_texts_alone(name: str) -> None:
    form, taken, not_taken = CASES[name]
    guided = acceptance(GuideType.STRUCTURAL_TAG, guide(form))
    assert [each for each in [*taken, *not_taken] if guided.takes(each)] == taken


@pytest.mark.parametrize("name", CASES)
def test_xgrammar_takes_the_same(name: str) -> None:
    form, taken, not_taken = CASES[name]
    oracle = xgrammar.Grammar.from_structural_tag(guide(form))
    assert [each for each in [*taken, *not_taken] if xgrammar_takes(oracle, each)] == taken


def test_the_older_form_means_triggered_tags() -> None:
    structures = [{"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"}]
    guided = acceptance(GuideType.STRUCTURAL_TAG, json.dumps({"structures": structures, "triggers": ["<f="]}))
    assert [each for each in ("", "x<f=b>1</f>y", "<f=a", "<f=b>x") if guided.begins(each)] == ["", "x<f=b>1</f>y"]


@pytest.mark.parametrize("end", range(1, len("x<<f=b>12</f>y")))
def test_an_output_may_be_anywhere_in_its_tags(end: int) -> None:
    guided = acceptance(GuideType.STRUCTURAL_TAG, guide(TRIGGERED))
    assert guided.begins("x<<f=b>12</f>y"[:end])


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "token", "token": 7}, "asks for tokens instead of text.*at token of /format"),
        ({"type": "any_tokens"}, "asks for tokens"),
        ({"type": "token_triggered_tags"}, "asks for tokens"),
        ({**tag("", FREE, ""), "begin": {"type": "token", "token": 1}}, "asks for tokens.*at begin of /format"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "style of parameters"),
        ({**OBJECT, "style": "glm_xml"}, "at style of /format"),
        ({**OBJECT, "any_order": True}, "at any_order of /format"),
        ({**FREE, "max_tokens": 7}, "at max_tokens of /format"),
        ({"type": "nonsense"}, "unknown type, at type of /format"),
        (of("sequence", {"type": "const_string"}), "at value of /format/elements/0"),
        ({**FREE, "exclude": ["a"]}, "not known, at exclude of /format"),
        ({**TRIGGERED, "triggers": ["<f=", "<f"]}, "exactly one of the triggers, at begin of /format/tags/0"),
        ({**TRIGGERED, "triggers": ["<g="]}, "exactly one of the triggers"),
        ({**TRIGGERED, "triggers": ["<f=", "<g"]}, "the trigger '<g' without a tag"),
        ({"type": "dispatch", "rules": [["ab", FREE], ["abc", FREE]]}, "within another"),
        ({"type": "regex", "pattern": "a(?=b)"}, "look-around.*/format"),
        ({"type": "regex", "pattern": "(" * 40 + ")" * 40}, "nested 40 levels deep"),
        (of("or", OBJECT, text('{"a')), "cannot be told apart"),
        (of("sequence", NUMBER, text("0")), "directly before the text '0'"),
        ({"type": "repeat", "min": 0, "max": 100_000, "content": FREE}, "bounds of a repetition"),
    ],
)
def test_what_is_not_served_is_refused_by_name(form: Form, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        acceptance(GuideType.STRUCTURAL_TAG, guide(form))
    assert str(refused.value).startswith("the guide ") and len(str(refused.value)) <= 200
