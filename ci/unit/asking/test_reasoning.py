"""Reasoning and answer are told apart, whatever pieces the text comes in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.asking.reasoning import MAX_WHITE_SPACE_CHARS, REASONING_TAGS, ReasoningSplitter, reasoning_style
from inflight.asking.tools.events import Content, Reasoning
from inflight.errors import ConfigurationError

TEXTS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<",
            "think>",
            "[THINK]",
            "[/THINK]",
            "<|channel>thought",
            "<channel|>",
            "/",
            " ",
            "\n",
            "a",
        ]
    )
    | st.text(),
    max_size=12,
).map("".join)


def split(text: str, cuts: list[int], *, starts_in_reasoning: bool, family: str = "qwen3") -> tuple[str, str]:
    splitter = ReasoningSplitter(starts_in_reasoning=starts_in_reasoning, tags=REASONING_TAGS[family])
    edges = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = [part for start, end in itertools.pairwise(edges) for part in splitter.feed(text[start:end])]
    parts += splitter.finish()
    kinds = (Reasoning, Content)
    reasoning, content = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in kinds)
    return reasoning, content


@given(TEXTS, st.lists(st.integers(0, 80)), st.booleans(), st.sampled_from(sorted(REASONING_TAGS)))
def test_pieces_do_not_matter(text: str, cuts: list[int], starts_in_reasoning: bool, family: str) -> None:
    whole = split(text, [], starts_in_reasoning=starts_in_reasoning, family=family)
    assert split(text, cuts, starts_in_reasoning=starts_in_reasoning, family=family) == whole
    assert split(text, [*range(len(text))], starts_in_reasoning=starts_in_reasoning, family=family) == whole


@given(TEXTS, st.booleans())
def test_only_tags_and_the_space_behind_them_are_dropped(text: str, starts_in_reasoning: bool) -> None:
    reasoning, content = split(text, [], starts_in_reasoning=starts_in_reasoning)
    kept = text
    if kept.lstrip(" \t\n\r").startswith("<think>"):
        kept = kept.lstrip(" \t\n\r").removeprefix("<think>").lstrip(" \t\n\r")
        starts_in_reasoning = True
    if not starts_in_reasoning:
        assert (reasoning, content) == ("", text)
        return
    before, closing, after = kept.partition("</think>")
    assert (reasoning, content) == (before, after.lstrip(" \t\n\r") if closing else "")


@pytest.mark.parametrize(
    ("text", "starts_in_reasoning", "parts"),
    [
        ("I add.</think>\n\n4", True, ("I add.", "4")),
        ("<think>\nI add.</think>\n\n4", True, ("I add.", "4")),
        ("\n<think>I add.</think>4", False, ("I add.", "4")),
        ("I add", True, ("I add", "")),
        ("4 <think>", False, ("", "4 <think>")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
        ("</think>4", True, ("", "4")),
        ("  4", False, ("", "  4")),
        ("  ", False, ("", "  ")),
        ("", True, ("", "")),
    ],
)
def test_where_reasoning_ends(text: str, starts_in_reasoning: bool, parts: tuple[str, str]) -> None:
    assert split(text, [], starts_in_reasoning=starts_in_reasoning) == parts


def test_gemmas_tag_is_a_special_token_and_a_word() -> None:
    text = "<|channel>thought\nI add.\n<channel|>4"
    assert split(text, [], starts_in_reasoning=False, family="gemma4") == ("I add.\n", "4")
    assert {*reasoning_style("gemma4").tags} >= {"<|channel>", "<channel|>"}
    assert split("<|channel>final\n4", [], starts_in_reasoning=False, family="gemma4") == ("", "<|channel>final\n4")


def test_only_what_may_begin_a_tag_is_held_back() -> None:
    splitter = ReasoningSplitter(starts_in_reasoning=True)
    assert splitter.feed("2 < 3 </thin") == [Reasoning("2 < 3 ")]
    assert splitter.feed("gs") == [Reasoning("</things")]


def test_space_before_a_tag_is_held_up_to_a_bound() -> None:
    splitter = ReasoningSplitter(starts_in_reasoning=False)
    space = " " * (MAX_WHITE_SPACE_CHARS + 1)
    assert splitter.feed(space) == [Content(space)]
    assert splitter.feed("<think>") == [Content("<think>")]


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="there is no reasoning parser nope: choose one of deepseek_r1, "):
        reasoning_style("nope")
