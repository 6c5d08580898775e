"""The table of `ci/FEATURES.md`: what a request can ask for, made from the requests that the tests serve in every way,
and what an engine can do besides, with tests of its own.

`python -m ci.feature_table` brings the page up to date, and `ci/unit/house/test_pages.py` fails where it is not.
"""

from __future__ import annotations

import sys
from pathlib import Path

CI = Path(__file__).resolve().parent
sys.path.insert(0, str(CI / "helpers"))

from engine_features import ENGINE_FEATURES, EngineFeature  # noqa: E402
from request_kinds import KINDS, WAYS, RequestKind  # noqa: E402
from state_features import KINDS_OF_STATE, STATE_FEATURES  # noqa: E402

from ci.page_part import with_part  # noqa: E402

PAGE = CI / "FEATURES.md"
BEGIN_STATES, END_STATES = "<!-- states: made by python -m ci.feature_table -->\n", "<!-- /states -->\n"
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


def state_table() -> str:
    """Markdown: a line for each feature, and whether it holds for each kind of state."""
    lines = [f"| feature | {' | '.join(KINDS_OF_STATE)} |", f"| --- |{' --- |' * len(KINDS_OF_STATE)}"]
    for feature, cells in STATE_FEATURES.items():
        lines.append(f"| {feature} | {' | '.join('yes' if '::' in cell else cell for cell in cells)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with both tables as they are now. Raises ValueError if it has no place for them."""
    return with_part(with_part(page, BEGIN, END, feature_table()), BEGIN_STATES, END_STATES, state_table())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
