"""Every causal language model of transformers is served as the page of its code says, or refused with that reason.

Run: pytest ci/unit/models/test_transformers_classes.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from causal_classes import MODEL_TYPES, REFUSAL, refusal_of, tried, try_on_ranks

from ci.page_part import with_part
from ci.transformers_table import BEGIN, END, PAGE, row_of, split_types, table
from inflight.models.transformers_refusals import REFUSED

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("one_thread")]


def told() -> dict[str, str]:
    """What the page says of each model type."""
    part = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if "| `" in line]
    return {name.strip("`"): outcome for name, _, outcome, *_ in rows}


SERVED = [name for name, outcome in told().items() if not outcome.startswith(REFUSAL)]


def test_the_page_has_a_line_for_each_model_type() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert sorted(told()) == sorted(MODEL_TYPES)
    assert with_part(page, BEGIN, END, table(told())) == page, "python -m ci.transformers_table --write"
    assert len(SERVED) >= 120


@pytest.mark.parametrize("model_type", SERVED)
def test_tokens_are_those_of_generate(tmp_path: Path, model_type: str) -> None:
    assert row_of(model_type, tried(model_type, tmp_path)) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("model_types", split_types(told()), ids=lambda names: names[0])
def test_two_ranks_give_the_same_tokens(tmp_path: Path, model_types: list[str]) -> None:
    try_on_ranks(model_types, tmp_path)


def test_the_others_are_refused_by_their_config_json(tmp_path: Path) -> None:
    for model_type in MODEL_TYPES.keys() - SERVED:
        assert f"{REFUSAL}{refusal_of(model_type, tmp_path / model_type)}" == told()[model_type]


def test_only_classes_of_transformers_are_refused_by_name() -> None:
    assert set(MODEL_TYPES.values()) >= REFUSED.keys()
