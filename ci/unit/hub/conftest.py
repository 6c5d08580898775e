"""A hub on loopback with one model, and who fetches from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_fetcher import FILES, NAME, UNREAD, Fetcher
from loopback_hub import LoopbackHub


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as running:
        running.publish(NAME, FILES | UNREAD)
        yield running


@pytest.fixture
def fetcher(hub: LoopbackHub, tmp_path: Path) -> Fetcher:
    return Fetcher(hub, tmp_path / "cache")
