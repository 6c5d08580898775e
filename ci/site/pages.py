"""The list of all pages, as docs/README.md has it: sections of pages, each with the question that it answers."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "docs" / "README.md"
ROW = re.compile(r"^\| (?:\*\*(?P<section>.+?)\*\* \||(?P<question>.+?) \| \[(?P<title>.+?)\]\((?P<link>\S+?)\)) \|")


@dataclass(frozen=True, slots=True)
class Page:
    section: str
    question: str
    title: str
    path: str
    """From the top of the repository."""


def all_pages() -> list[Page]:
    pages, section = [], ""
    rows = LIST.read_text(encoding="utf-8").split("\n| the question |")[1].splitlines()[2:]
    for row in filter(None, map(ROW.match, rows)):
        section = row["section"] or section
        if row["link"]:
            path = os.path.normpath(os.path.join(LIST.parent.relative_to(ROOT), row["link"]))
            pages.append(Page(section, row["question"], row["title"], path))
    return pages
