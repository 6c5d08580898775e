"""Waits for what only a look can tell."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 240.0
"""Seconds after which a test gives up waiting. It says nothing about how fast anything is."""
SHORTEST, LONGEST = 0.01, 0.25
"""Seconds between two looks."""
SHARE = 10
"""A look may read what there is of every process of the machine: so it has the processor for a tenth of the time."""


def until(condition: Callable[[], object], what: str = "it happens", patience: float = PATIENCE) -> None:
    """Look until `condition` holds; fails with `what`."""
    deadline = time.monotonic() + patience
    while True:
        begun = time.perf_counter()
        if condition():
            return
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(min(max(SHARE * (time.perf_counter() - begun), SHORTEST), LONGEST))
