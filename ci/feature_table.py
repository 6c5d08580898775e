"""README's table of what a request can ask for, made from the requests that the tests serve in every way, and of what
an engine can do besides, with tests of its own.

`python -m ci.feature_table` brings README up to date, and `ci/unit/house/test_readme.py` fails where it is not.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "ci" / "helpers"))

from engine_features import ENGINE_FEATURES, EngineFeature  # noqa: E402
from request_kinds import KINDS, WAYS, RequestKind  # noqa: E402

BEGIN, END = "<!-- features: made by python -m ci.feature_table -->\n", "<!-- /features -->\n"


def feature_table() -> str:
    """Markdown: a line for each kind of request and feature of an engine, and the reasons of what is not served."""
    columns = ["feature", *WAYS, "kernels of its own"]
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in (*KINDS, *ENGINE_FEATURES)]
    return "\n".join(lines) + "\n"


def _cells(row: RequestKind | EngineFeature) -> list[str]:
    if isinstance(row, EngineFeature):
        ways = ["yes" if way in row.proofs else row.cells[way] for way in WAYS]
    else:
        ways = [f"no: {row.exceptions[way]}" if way in row.exceptions else "yes" for way in WAYS]
    return [row.feature, *ways, ", ".join(f"`{name}`" for name in row.kernels) or "none"]


def with_table(readme: str) -> str:
    """README with the table as it is now. Raises ValueError if it has no place for it."""
    before, found, rest = readme.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError("README.md lacks the lines between which the table of features stands")
    return before + BEGIN + "\n" + feature_table() + "\n" + END + after


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
