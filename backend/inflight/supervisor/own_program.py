"""How the supervisor starts programs of its own: modules of this package, with its interpreter."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def command_of(module: str, *arguments: str) -> list[str]:
    """What runs `module`."""
    return [sys.executable, "-m", module, *arguments]


def environment_of(inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited`, and no import from the folder in which the supervisor was started, where anybody may have put
    modules. Python knows the variable from 3.11 on."""
    return {**inherited, "PYTHONSAFEPATH": "1"}
