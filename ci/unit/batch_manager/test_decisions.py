"""What is decided on equal input stays what it was, to the last block: digests of seeded histories.

A change that is meant to change decisions writes them anew, and says in its message what changed and why:
`python ci/helpers/decision_history.py > ci/golden/decisions.json`
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decision_history import SEEDS, digest_of_history

GOLDEN: list[str] = json.loads((Path(__file__).parents[2] / "golden" / "decisions.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("seed", "digest"), list(zip(SEEDS, GOLDEN, strict=True)))
def test_decisions_are_what_they_were(seed: int, digest: str) -> None:
    assert digest_of_history(seed) == digest


def test_no_two_histories_are_alike() -> None:
    assert len(set(GOLDEN)) == len(SEEDS)
