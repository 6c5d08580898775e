"""Text as content blocks: they do not depend on how it is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from inflight.asking.chat_format import ChatFormat
from inflight.asking.reasoning import MAX_WHITE_SPACE_CHARS, reasoning_style
from inflight.http.dialects.anthropic.content_blocks import ContentBlocks

SPACE = " " * (MAX_WHITE_SPACE_CHARS + 1)
"""More than is held before a tag."""


def read(family: str, pieces: Iterable[str]) -> list[dict[str, Any]]:
    blocks = ContentBlocks(ChatFormat(make_splitter=reasoning_style(family).splitter_maker("")))
    blocks.open()
    for piece in pieces:
        blocks.add(piece)
    blocks.finish()
    return blocks.fields()


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def thought(value: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": value, "signature": ""}


@pytest.mark.parametrize(
    ("family", "written", "blocks"),
    [
        ("qwen3", "<think>\nHm </think>\n\nYes\n", [thought("Hm "), text("Yes\n")]),
        ("qwen3", SPACE + "Yes", [text(SPACE + "Yes")]),
        ("qwen3", SPACE, []),
        ("harmony", "<|channel|>final<|message|> \n Yes", [text(" \n Yes")]),
        (
            "harmony",
            "<|channel|>analysis<|message|> <|end|><|channel|>final<|message|>Yes<|end|>"
            "<|channel|>analysis<|message|>Hm",
            [text("Yes"), thought("\nHm")],
        ),
    ],
)
def test_white_space_begins_a_block_if_text_follows(family: str, written: str, blocks: list[dict[str, Any]]) -> None:
    assert read(family, [written]) == blocks
    assert read(family, written) == blocks
