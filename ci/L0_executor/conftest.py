"""Engines with real ranks, and a directory of the user's engines and jobs, for one test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_engine import StartEngine, starting


@pytest.fixture
def user_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """That of this test, which ranks and fronts use instead of the user's own. A socket's path must be short."""
    path = Path(tempfile.mkdtemp(prefix="user-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    with starting() as start:
        yield start
