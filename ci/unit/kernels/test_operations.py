"""Python and C++ have the same structures: the header is that of operations.py, and a library of others is not loaded.

Run: pytest ci/unit/kernels/test_operations.py
"""

from __future__ import annotations

import re

import pytest
from compiled_network import needs_compiler

from inflight_kernels.cpu import LibraryUnavailable, library, load_library
from inflight_kernels.cpu.operation_header import HEADER, header
from inflight_kernels.cpu.structures import layout


def test_the_header_is_that_of_the_table() -> None:
    assert HEADER.read_text(encoding="utf-8") == header(), "run python -m inflight_kernels.cpu.operation_header"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "what"),
    [({"offsetof(Lora, b)": 8}, "offsetof(Lora, b)"), ({"sizeof(Another)": 8}, "sizeof(Another)"), ({}, "their end")],
)
def test_a_library_with_other_structures_is_refused(
    change: dict[str, int], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = layout() | change
    if not change:
        expected.popitem()
    monkeypatch.setattr(library, "layout", lambda: expected)
    with pytest.raises(LibraryUnavailable, match=re.escape(f"other structures than Python, from {what} on")):
        load_library()
