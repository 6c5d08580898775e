"""The table of `backend/inflight/models/TRANSFORMERS.md`: which classes of transformers its own code serves, found out
by trying each of them.

    python -m ci.transformers_table             says what differs
    python -m ci.transformers_table --write     brings the page up to date
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "ci" / "helpers"))

from causal_classes import MODEL_TYPES, ONE_BY_ONE, TOGETHER, tried  # noqa: E402

from ci.page_part import renew, with_part  # noqa: E402
from inflight.models.families import FAMILIES  # noqa: E402

PAGE = ROOT / "backend" / "inflight" / "models" / "TRANSFORMERS.md"
BEGIN, END = "<!-- classes: made by python -m ci.transformers_table --write -->\n", "<!-- /classes -->\n"


def row_of(model_type: str, outcome: str) -> str:
    """A line of the table."""
    architecture = MODEL_TYPES[model_type]
    native = "yes" if architecture in FAMILIES else ""
    return f"| `{model_type}` | `{architecture}` | {outcome} | {native} |"


def table(outcomes: Mapping[str, str]) -> str:
    """Markdown: how many classes are served, and a line for each."""
    counts = Counter(outcomes.values())
    served = counts[TOGETHER] + counts[ONE_BY_ONE]
    lines = [
        f"Of {len(outcomes)} model types {served} are served: {counts[TOGETHER]} {TOGETHER}, {counts[ONE_BY_ONE]} "
        f"{ONE_BY_ONE}.",
        "",
        "| model type | class | served | has native layers |",
        "| --- | --- | --- | --- |",
        *(row_of(model_type, outcome) for model_type, outcome in outcomes.items()),
    ]
    return "\n".join(lines) + "\n"


def try_all() -> dict[str, str]:
    """Takes minutes."""
    torch.set_num_threads(1)  # tiny products: more threads mostly wait for each other
    outcomes = {}
    for model_type in sorted(MODEL_TYPES):
        with tempfile.TemporaryDirectory() as folder:
            outcomes[model_type] = tried(model_type, Path(folder))
    return outcomes


if __name__ == "__main__":
    renew(PAGE, lambda page: with_part(page, BEGIN, END, table(try_all())), "python -m ci.transformers_table --write")
