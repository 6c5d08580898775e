"""Values in JSON's and in Python's spelling are read in any pieces and written as JSON."""

from __future__ import annotations

import ast
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.asking.tools.value_reader import MAX_NESTING, MAX_SCALAR_CHARS, Progress, Spelling, ValueReader

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
NEARLY_VALUES = st.text(alphabet="""[]{}"',:\\ \n-+.0123456789eExXuUTrueFalsNon_af""")


def read(text: str, spelling: Spelling, cuts: list[int] | None = None) -> tuple[Progress, str, str, str]:
    """(how it ended, what was written, what was read and not written, what was not read)"""
    reader = ValueReader(spelling)
    written, unread = "", text
    edges = sorted({min(cut, len(text)) for cut in cuts or []} | {0, len(text)})
    for start, end in itertools.pairwise(edges):
        stop = reader.feed(text, start, end)
        written += reader.take()
        unread = text[stop:]
        if reader.progress is not Progress.MORE:
            break
    reader.finish()
    return reader.progress, written + reader.take(), reader.unwritten, unread


def no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON, though Python's parser takes it")


@given(VALUES)
def test_json_is_written_as_it_stands(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert read(text, Spelling.JSON) == (Progress.DONE, text, "", "")


@given(VALUES)
def test_python_becomes_json_of_the_same_value(value: object) -> None:
    progress, written, unwritten, unread = read(repr(value), Spelling.PYTHON)
    assert (progress, unwritten, unread) == (Progress.DONE, "", "")
    assert json.loads(written) == value


@given(NEARLY_VALUES)
def test_what_is_written_means_what_a_real_parser_reads(text: str) -> None:
    progress, written, _, unread = read(text, Spelling.PYTHON)
    if progress is Progress.DONE and not unread:
        try:
            meant = ast.literal_eval(text.lstrip(" \n"))
        except (SyntaxError, ValueError):  # true, false and null are no Python, and line ends are where Python has none
            meant = None
        if meant is not None:
            assert json.loads(written) == meant
    progress, written, _, unread = read(text, Spelling.JSON)
    if progress is Progress.DONE:
        json.loads(written)
    try:
        json.loads(text, parse_constant=no_constant)
    except ValueError:
        return
    assert (progress, unread.strip()) == (Progress.DONE, "")


@given(NEARLY_VALUES | st.text() | VALUES.map(json.dumps) | VALUES.map(repr), st.lists(st.integers(0, 60)))
def test_pieces_do_not_matter_and_nothing_is_lost(text: str, cuts: list[int]) -> None:
    for spelling in Spelling:
        progress, written, unwritten, unread = read(text, spelling, cuts)
        assert (progress, written, unwritten, unread) == read(text, spelling)
        if progress is Progress.BROKEN:
            assert text.endswith(unwritten + unread)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (r"'it\'s'", "it's"),
        ('"say \\"no\\""', 'say "no"'),
        ("'say \"no\"'", 'say "no"'),
        (r"'\d+\x41\u00e9\U0001F600'", "\\d+Aé😀"),
        ("'a\\\nb'", "ab"),
        ("0x1F", 31),
        ("1_000", 1000),
        ("+5", 5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1e3", -1000.0),
        ("True", True),
        ("null", None),
        ("[1, ['a'], {'b': None}]", [1, ["a"], {"b": None}]),
    ],
)
def test_pythons_spelling(text: str, meant: object) -> None:
    progress, written, _, unread = read(text + ",", Spelling.PYTHON)
    assert (progress, unread) == (Progress.DONE, ",")
    assert json.loads(written) == meant


@pytest.mark.parametrize(
    "text",
    [
        "f()",
        "1+1",
        "a.b",
        "(1, 2)",
        "'a' 'b'x",
        "b'x'",
        "f'{x}'",
        "nan",
        "1j",
        "{1: 2}",
        "{'a'}",
        "[1,]",
        "007",
    ]
    + ["'\\N{DASH}'", "'\\x4g'", "'\\U00110000'", "'a\nb'", "lambda: 0", "not True", "--1", "..."],
)
def test_what_is_no_literal_breaks(text: str) -> None:
    progress, _, _, unread = read(text + ",", Spelling.PYTHON)
    assert progress is Progress.BROKEN or unread != ","


@pytest.mark.parametrize(
    "text", ["NaN", "-", "01", "1.", "+1", "'a'", "True", '"\\d"', '"\\u12g4"', "[1,]", "{,}", "]"]
)
def test_what_json_does_not_know_breaks(text: str) -> None:
    assert read(text + " ", Spelling.JSON)[0] is Progress.BROKEN


def test_line_ends_in_texts_are_escaped() -> None:
    assert read('"a\nb\tc\x00"', Spelling.JSON)[:2] == (Progress.DONE, '"a\\nb\\tc\\u0000"')


def test_depth_and_length_of_a_number_are_bounded() -> None:
    for spelling in Spelling:
        assert read("[" * MAX_NESTING + "]" * MAX_NESTING, spelling)[0] is Progress.DONE
        assert read("[" * 100_000, spelling)[0] is Progress.BROKEN
        assert read("1" * MAX_SCALAR_CHARS, spelling)[0] is Progress.DONE
        assert read("1" * (MAX_SCALAR_CHARS + 1), spelling)[0] is Progress.BROKEN
