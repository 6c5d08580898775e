"""The tree of ARCHITECTURE.md, described by the first sentences of the modules' own docstrings.

    python -m ci.tree             says what differs
    python -m ci.tree --write     brings the page up to date

Which folders and modules are named is chosen in the page: a line there needs only a name. What stands behind the name
of a module, or of a package, is written here; only what has no docstring (folders of data, files that are no Python)
keeps the words that it has in the page.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ci.page_part import renew

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "backend" / "ARCHITECTURE.md"
FENCE = re.compile(r"(?<=\n## The tree\n\n```\n).*?(?=```)", re.DOTALL)
COLUMN = 36
"""Where descriptions begin, or two spaces behind a longer name."""
SHORTEST, LONGEST = 20, 90
"""Characters of a description: what is longer ends before the first sign that begins an addition."""


def entries(tree: str) -> Iterator[tuple[str, str, str]]:
    """(the line up to its names' end, path of its first name, description) of each line."""
    parents: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names, _, words = line.strip().partition("  ")
        first = names.split()[0]
        yield "  " * depth + names, "".join(parents[:depth]) + first, words.strip()
        parents[depth:] = [first] if first.endswith("/") else []


def described(path: Path) -> str | None:
    """The first sentence of a module or package, without its full stop; None = it has no docstring."""
    module = path / "__init__.py" if path.is_dir() else path
    if module.suffix != ".py" or not module.is_file():
        return None
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not text:
        return None
    sentence = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0].rstrip(".:")
    for sign in ("; ", ": ", " (", ", "):
        head = sentence.split(sign)[0]
        if len(sentence) > LONGEST and len(head) > SHORTEST:
            sentence = head
    return sentence


def with_descriptions(page: str) -> str:
    lines = []
    for shown, path, words in entries(FENCE.search(page)[0]):  # type: ignore[index]
        words = described(ROOT / path.rstrip("/")) or words if len(shown.split()) == 1 else words
        lines.append(f"{shown:<{COLUMN - 2}}  {words}".rstrip() + "\n")
    return FENCE.sub(lambda _: "".join(lines), page)


if __name__ == "__main__":
    renew(PAGE, with_descriptions, "The tree is not what the docstrings say: python -m ci.tree --write")
