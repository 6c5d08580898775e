"""The process of an OpenAI server, before it serves.

pytest ci/unit/http/test_serve.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.http.serve import announce, tell_absence
from inflight.run_directory import RUN_DIRECTORY


def test_an_engine_that_has_to_be_waited_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    tell_absence("other", 600.0)
    assert capsys.readouterr().err == "inflight: no engine called 'other' serves here; waiting for it, 600 s at most\n"


def test_the_address_comes_first_and_then_how_calls_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    announce("h:1", tools="calls of tools are read as hermes")
    announce("h:2", tools="")
    first, tools, second = capsys.readouterr().err.splitlines()
    assert (first, second) == tuple(f"inflight: OpenAI API on http://h:{port}/v1" for port in (1, 2))
    assert tools == "inflight: calls of tools are read as hermes"
