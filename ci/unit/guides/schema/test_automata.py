"""Expressions that are made of others match what `re` says that those match or do not."""

from __future__ import annotations

import random
import re

import pytest

from inflight.guides.schema.automata import Unread, combined, divided
from inflight.guides.schema.patterns import translate

PATTERNS = (
    "^a",
    "b$",
    r"^a|b$|\d",
    "^[a-c]{2,4}$",
    "(a|b)*a(a|b){3}",
    "^$",
    "[^a]",
    "^(^a|b)c?$",
    r"\w\s\w",
    "^(?:a+|b+c)*$",
    "é|[À-Ö]",
    r"^[^\n]*\x01?$",
    "a.c",
)
CHARACTERS = "aabbcc1 xÄé\n\x01\U0001f600"


def free(steps: int) -> None:
    """No bound."""


def texts() -> list[str]:
    draw = random.Random(7)
    return ["", *("".join(draw.choices(CHARACTERS, k=draw.randint(1, 7))) for _ in range(400))]


def matches(pattern: str, text: str) -> bool:
    return re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None


def made_matches(expression: str | None, text: str) -> bool:
    """By Python, which writes the codes of characters in another way."""
    if expression is None:
        return False
    written = re.sub(r"\\x\{([0-9A-F]+)\}", lambda braced: f"\\U{int(braced[1], 16):08X}", expression)
    return re.fullmatch(written.removeprefix("^").removesuffix("$"), text) is not None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_complement_is_all_other_texts(pattern: str) -> None:
    made = combined((translate(pattern, ""),), lambda flags: not flags[0], free)
    assert [text for text in texts() if made_matches(made, text) == matches(pattern, text)] == []


def test_texts_are_divided_by_what_they_match() -> None:
    draw = random.Random(3)
    for _ in range(8):
        patterns = draw.sample(PATTERNS[:8], 3)
        kinds = divided(tuple(translate(pattern, "") for pattern in patterns), free)
        for text in texts():
            flags = tuple(matches(pattern, text) for pattern in patterns)
            assert [kind for kind, made in kinds.items() if made_matches(made, text)] == [flags]


def test_nothing_is_no_expression() -> None:
    assert combined(("x*",), lambda flags: not flags[0], free) is None


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){30}", "^a{3000}$", r"\p{L}", "^([a-z]{1,300}[0-9]{1,300}){1,3}$"])
def test_what_is_too_large_is_not_read(pattern: str) -> None:
    with pytest.raises(Unread):
        combined((pattern,), lambda flags: not flags[0], free)
