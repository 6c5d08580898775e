"""A client's own grammar in Lark."""

from __future__ import annotations

import pytest
from grammar_acceptance import acceptance

from inflight.guided_decoding import GuideType, Reasoning, WhiteSpace
from inflight.guides.refusal import GuideRefused


@pytest.mark.parametrize(
    ("grammar", "taken", "not_taken"),
    [
        ('start: "a" x "c"\nx: "b"*', ["ac", "abbc"], ["a", "b"]),
        ("start: NUMBER\nNUMBER: /[0-9]+/ // a comment: <x> @y\n# %llguidance {}", ["12"], ["", "x"]),
        ('start: "%llguidance" /<a>@x/', ["%llguidance<a>@x"], []),
        ('start: "a"~2..3 "b"{1,2}', ["aab", "aaabb"], ["ab"]),
        ('start: %regex {"substring_words": "a b c"}', ["a b", "b c"], ["a c"]),
        ('start: "x" %json {"type": "array", "items": {"type": "integer"}} "y"', ["x[1, 2]y", "x[]y"], ["x[1,2]y"]),
        ('start: %json {"type": "object", "properties": {"a": {"const": "%json }"}}}', ['{"a": "%json }"}'], ["{"]),
        ('?start: "a" | b\n?b: "c" start', ["a", "ca"], ["c"]),
        ("start: word\nword[lazy]: /[a-z]*;/", ["ab;"], ["ab", "a;b;"]),
    ],
)
def test_its_texts_alone_are_taken(grammar: str, taken: list[str], not_taken: list[str]) -> None:
    guided = acceptance(GuideType.LARK_GRAMMAR, grammar)
    assert [text for text in [*taken, *not_taken] if guided.takes(text)] == taken


def test_white_space_of_its_json_is_the_requests() -> None:
    guided = acceptance(GuideType.LARK_GRAMMAR, 'start: %json {"type": "array"}', white_space=WhiteSpace.COMPACT)
    assert [text for text in ("[1,2]", "[1, 2]") if guided.takes(text)] == ["[1,2]"]


def test_a_reasoning_comes_before_it() -> None:
    reasoning = Reasoning(opening="<think>", closing="</think>")
    guided = acceptance(
        GuideType.LARK_GRAMMAR,
        'start: "a" thought?  // start\nthought: "b" start | "start" THOUGHT0\nTHOUGHT0: "!"',
        reasoning=reasoning,
    )
    texts = ("a", "aba", "<think>x</think>\n\naba", "<think>a", "ab", "astart!", "aanswer!")
    assert [text for text in texts if guided.takes(text)] == [
        "a",
        "aba",
        "<think>x</think>\n\naba",
        "astart!",
    ]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('%llguidance {"no_forcing": false}\nstart: "a"', "line 1, column 1: %llguidance is not served"),
        ("start: <|end|>", "line 1, column 8: '<|end|>' names a token"),
        ("start: <[17]>", "names a token"),
        ("start: @other", "refers to another grammar"),
        ('start: x\nx[stop="b"]: /a*/', "line 2, column 3: 'stop' is an attribute"),
        ("start: x\nx[max_tokens=3]: /a*/", "'max_tokens' is an attribute"),
        ('begin: "a"', "no rule named start"),
        ("start: x", "uses x, which it does not define"),
        ("start: %json {", "%json is not followed by valid JSON"),
        ('start: "a"{1,100000}', "a repetition of more than 1000"),
        ('start: "a"~100000', "a repetition of more than 1000"),
        ("start: ((", "not in the syntax"),
    ],
)
def test_what_is_not_served_is_refused(grammar: str, words: str) -> None:
    with pytest.raises(GuideRefused, match=words) as refused:
        acceptance(GuideType.LARK_GRAMMAR, grammar)
    assert len(str(refused.value)) <= 200
