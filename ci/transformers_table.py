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

from causal_classes import (  # noqa: E402
    MODEL_TYPES,
    ONE_BY_ONE,
    REFUSAL,
    TOGETHER,
    against_ranks,
    tried,
    try_on_ranks,
)

from ci.page_part import renew, with_part  # noqa: E402
from inflight.models.families import FAMILIES  # noqa: E402
from inflight.models.transformers_plan import NO_PLAN  # noqa: E402

PAGE = ROOT / "backend" / "inflight" / "models" / "TRANSFORMERS.md"
BEGIN, END = "<!-- classes: made by python -m ci.transformers_table --write -->\n", "<!-- /classes -->\n"


SPLIT = "yes"
AT_ONCE = 8
"""Model types that two ranks compute, one after the other."""


def row_of(model_type: str, outcome: str) -> str:
    """A line of the table."""
    architecture = MODEL_TYPES[model_type]
    native = "yes" if architecture in FAMILIES else ""
    return f"| `{model_type}` | `{architecture}` | {outcome} | {on_ranks(model_type, outcome)} | {native} |"


def on_ranks(model_type: str, outcome: str) -> str:
    """Whether several ranks serve it."""
    if outcome.startswith(REFUSAL):
        return ""
    reason = against_ranks(model_type)
    return SPLIT if not reason else "no `tp_plan`" if reason == NO_PLAN else f"no: {reason}"


def split_types(outcomes: Mapping[str, str]) -> list[list[str]]:
    """Model types that several ranks serve, in lists for two ranks each."""
    found = [name for name, outcome in outcomes.items() if on_ranks(name, outcome) == SPLIT]
    return [found[first : first + AT_ONCE] for first in range(0, len(found), AT_ONCE)]


def table(outcomes: Mapping[str, str]) -> str:
    """Markdown: how many classes are served, and a line for each."""
    counts = Counter(outcomes.values())
    served = counts[TOGETHER] + counts[ONE_BY_ONE]
    num_split = sum(map(len, split_types(outcomes)))
    lines = [
        f"Of {len(outcomes)} model types {served} are served: {counts[TOGETHER]} {TOGETHER}, {counts[ONE_BY_ONE]} "
        f"{ONE_BY_ONE};",
        f"{num_split} of them on several ranks, too.",
        "",
        "| model type | class | served | on several ranks | has native layers |",
        "| --- | --- | --- | --- | --- |",
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
    for model_types in split_types(outcomes):
        with tempfile.TemporaryDirectory() as folder:
            try_on_ranks(model_types, Path(folder))
    return outcomes


if __name__ == "__main__":
    renew(PAGE, lambda page: with_part(page, BEGIN, END, table(try_all())), "python -m ci.transformers_table --write")
