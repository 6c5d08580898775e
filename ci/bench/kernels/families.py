"""Every bench case: `ci/kernels/<family>/bench_cases.py` of each family of kernels."""

from __future__ import annotations

import importlib
from pathlib import Path

from ci.bench.kernels.case import Case

FAMILIES = Path(__file__).parents[2] / "kernels"


def family_names() -> list[str]:
    """The families that have bench cases."""
    return sorted(path.parent.name for path in FAMILIES.glob("*/bench_cases.py"))


def all_cases(tiny: bool, only: str = "") -> list[Case]:
    """The cases of all families by kernel number; `only` keeps those whose kernel or title it names."""
    modules = (importlib.import_module(f"ci.kernels.{family}.bench_cases") for family in family_names())
    cases = [case for module in modules for case in module.cases(tiny)]
    titles = [case.title for case in cases]
    twice = {title for title in titles if titles.count(title) > 1}
    if twice:
        raise ValueError(f"bench cases of the same title: {sorted(twice)}")
    chosen = [case for case in cases if not only or only == case.kernel or only.lower() in case.title.lower()]
    return sorted(chosen, key=lambda case: int(case.kernel[1:]))
