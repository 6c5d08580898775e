"""The files of `backend/monitoring` ask for metrics that exist, and the dashboard is the one that its table makes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci.dashboard import FILE, expressions, text
from inflight.http.metrics import ServerMetrics
from inflight.metric_families import FAMILIES

MONITORING = Path(__file__).resolve().parents[3] / "backend" / "monitoring"
NAME = re.compile(r"\b(?:inflight|nv)_\w+\b(?!=)")
"""And not a label, which an equals sign follows."""


def known() -> set[str]:
    """The names of all series."""
    names = set()
    for family in FAMILIES:
        parts = ("_bucket", "_sum", "_count") if family.kind == "HISTOGRAM" else ("",)
        names |= {family.name + part for part in parts}
    described = re.findall(r"^# TYPE (\S+) (\S+)$", ServerMetrics().text({}).decode(), re.MULTILINE)
    for name, kind in described:
        names |= {name + part for part in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))}
    return names


def test_the_dashboard_is_made_from_its_table() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "run: python -m ci.dashboard"


@pytest.mark.parametrize("source", ["dashboard", "alerts"])
def test_everything_asked_for_exists(source: str) -> None:
    if source == "dashboard":
        asked = "\n".join(expression for _, expression in expressions())
    else:
        asked = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
    found = set(NAME.findall(asked))
    assert found and found <= known(), found - known()


def test_every_rule_has_a_history_in_which_it_fires() -> None:
    rules = re.findall(r"- alert: (\w+)", (MONITORING / "alerts.yml").read_text(encoding="utf-8"))
    tests = (MONITORING.parents[1] / "ci" / "L0_monitoring" / "alerts_test.yml").read_text(encoding="utf-8")
    fired = re.findall(r"alertname: (\w+)\n\s+eval_time: \w+\n\s+exp_alerts:", tests)
    assert sorted(fired) == sorted(rules)
