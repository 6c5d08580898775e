"""The table of formats in the page of models says what they do.

Run: pytest ci/unit/models/test_format_table.py
"""

from __future__ import annotations

import pytest
from compiled_network import needs_compiler

from ci.format_table import PAGE, with_table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), needs_compiler]


def test_the_table_is_what_trying_each_format_gives() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "python -m ci.format_table --write brings it up to date"
