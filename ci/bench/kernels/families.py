"""Every bench case: of each family of `inflight_kernels.functions`, the file of the same stem in this folder."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from ci.bench.kernels.case import Case
from inflight_kernels import functions


def family_names() -> list[str]:
    """The families that have bench cases."""
    stems = (module.name for module in pkgutil.iter_modules(functions.__path__))
    return [stem for stem in stems if Path(__file__).with_name(f"{stem}.py").exists()]


def all_cases(tiny: bool, only: str = "") -> list[Case]:
    """The cases of all families by kernel number; `only` keeps those whose kernel or title it names."""
    cases = [
        case for family in family_names() for case in importlib.import_module(f"ci.bench.kernels.{family}").cases(tiny)
    ]
    titles = [case.title for case in cases]
    twice = {title for title in titles if titles.count(title) > 1}
    if twice:
        raise ValueError(f"bench cases of the same title: {sorted(twice)}")
    chosen = [case for case in cases if not only or only == case.kernel or only.lower() in case.title.lower()]
    return sorted(chosen, key=lambda case: int(case.kernel[1:]))
