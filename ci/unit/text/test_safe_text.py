"""Text of clients in messages and logs is short, printable and on one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.text.safe_text import safe_text


@given(st.text(max_size=400))
def test_echoed_text_is_short_and_printable(text: str) -> None:
    shown = safe_text(text)
    assert shown.isprintable() and len(shown.encode("utf-8", "replace")) <= 256


def test_a_forged_log_line_is_escaped() -> None:
    assert safe_text("\n[ERROR] fake\x1b[31m") == "\\n[ERROR] fake\\x1b[31m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x" * 256, "x" * 256),
        ("x" * 257, "x" * 253 + "..."),
        ("é" * 129, "é" * 126 + "..."),  # a character is not cut in two
        ("\n" * 129, "\\n" * 126 + "\\..."),
    ],
)
def test_long_text_is_cut_where_all_can_see_it(text: str, shown: str) -> None:
    assert safe_text(text) == shown
