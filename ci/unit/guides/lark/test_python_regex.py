"""Regular expressions held against Python's own re.fullmatch."""

from __future__ import annotations

import re

import pytest
from grammar_acceptance import acceptance

from inflight.guided_decoding import GuideType
from inflight.guides.refusal import GuideRefused

PATTERNS = [
    *("a", "abc", "a|bc|", "(ab)*c", "a+?b", "(?:x|y){2,3}", "a{2}", "a{2,}", "a{,2}", "()", "(?P<n>a)b", "a/b\\/c"),
    *(".", "a.c", "(?s).", "(?s:a.)c", r"\d+", r"\D", r"\w+", r"\W", r"\s", r"\S+", r"[\w.-]+", r"[^\w]", r"[^\W\d]+"),
    *("^a$", r"\Aab\Z", "^a|b$", "(^a)", "(a|b)$", "^$", "[a-c&&b]", "[[:alpha:]]", "[[]", "[]a]", "[^]a]", r"[\]\\-]"),
    *(
        "(?i)straße",
        "(?i)[a-c]x",
        "(?i:a)b",
        "(?i)[^a]",
        "a(?#note)b",
        r"\n\t",
        r"\x41\u0042",
        r"\.",
        r"[\d\s]",
        r"a\ b",
    ),
    *(
        "(?a)\\w",
        "(?a)[\\W]",
        "[é-ü]",
        "é",
        r"[^\n]",
        "~|#",
        "a b",
        '"',
        "'",
        "(?:a|ab)(?:c|bcd)",
        "(?:aa)*(?:aaa)?",
        "[a~~b]",
    ),
]
TEXTS = [
    *("", "a", "b", "c", "x", "é", "É", "ü", "\n", "ab", "abc", "bc", "aab", "aaab", "aa", "aaa", "xy", "xyx", "a.c"),
    *(
        "a\nc",
        "a\nc"[:2],
        "5",
        "٣",
        "45",
        "_",
        "-",
        ".",
        "a-b.c",
        "é_",
        " ",
        "\u3000",
        "\u0301",
        "²",
        "&",
        "[",
        "]",
        ":",
    ),
    *("l:]", ":]", "a]", "\\", "STRASSE", "straße", "STRAßE", "AX", "Ax", "Ab", "A", "ababc", "\n\t", "AB", "a/b/c"),
    *(
        "a b",
        "b]",
        "~",
        "#",
        '"',
        "'",
        "/",
        "abcd",
        "abbcd",
        "ac",
        "aaaa",
        "aaaaaaa",
        "\U0001f600",
        "a\U0001f600c",
        "\x1c",
    ),
]


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_output_matches_as_python_says(pattern: str) -> None:
    guided = acceptance(GuideType.REGEX, pattern)
    for text in TEXTS:
        assert guided.takes(text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize(
    ("pattern", "taken", "not_taken"),
    [
        (r"\p{L}+", ["a", "éß"], ["1", ""]),
        (r"[\p{Lu}_]\pN", ["A1", "_²"], ["a1"]),
        (r"\P{L}", ["1"], ["a"]),
        (r"[^\p{L}]", ["1", "\n"], ["a"]),
        (r"\p{Greek}", ["α"], ["a"]),
    ],
)
def test_classes_of_unicode_are_taken_that_python_does_not_know(
    pattern: str, taken: list[str], not_taken: list[str]
) -> None:
    guided = acceptance(GuideType.REGEX, pattern)
    assert [text for text in [*taken, *not_taken] if guided.takes(text)] == taken


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a(?=b)", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "back reference"),
        (r"\bword", "word boundary"),
        (r"a\B", "word boundary"),
        ("a$b", "an anchor within"),
        ("x^y", "an anchor within"),
        ("(a$)*", "an anchor within"),
        ("(?m)^a$", r"\(\?m\)"),
        ("(?x) a", r"\(\?x\)"),
        ("(a)?(?(1)b|c)", "conditional group"),
        ("a{1,100000}", "more than 20000 parts"),
        ("((a{1,1000}){1,1000}){1,1000}", "more than 20000 parts"),
        ("[a-", "is no regular expression: unterminated character set at character 1"),
        ("a)", "unbalanced parenthesis at character 2"),
        (r"[\p{L}-z]", r"bad character range \\p\{L\}-z"),
        (r"\ud800", "half of a surrogate pair"),
        ("\ud800", "half of a surrogate pair"),
        (r"[^\s\S]", "cannot be followed"),
        (r"\p{Nonsense}", "cannot be followed"),
    ],
)
def test_what_no_lexer_follows_is_refused_by_name(pattern: str, words: str) -> None:
    with pytest.raises(GuideRefused, match=words):
        acceptance(GuideType.REGEX, pattern)
