"""Waits for what only a look can tell."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 240.0
"""Seconds after which a test gives up waiting. It says nothing about how fast anything is."""


def until(condition: Callable[[], object], what: str = "it happens", patience: float = PATIENCE) -> None:
    """Look until `condition` holds; fails with `what`."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.01)
