"""The installed numpy is refused only where tritonserver's stub cannot read texts with it.

pytest ci/unit/test_numpy_check.py
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from inflight.errors import ConfigurationError
from inflight.numpy_check import check_numpy


@pytest.fixture
def old_stub(tmp_path: Path) -> Path:
    (tmp_path / "old").write_bytes(b"\0numpy.core.multiarray\0")
    return tmp_path / "old"


@pytest.mark.parametrize("version", ["2.0.0", "2.4.6"])
def test_numpy_2_is_refused_for_a_stub_built_before_it(
    old_stub: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ConfigurationError, match=rf"numpy {version} .*install 'numpy<2'"):
        check_numpy(old_stub)


def test_numpy_2_is_accepted_for_a_stub_built_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.1.0")
    (tmp_path / "new").write_bytes(b"\0numpy._core\0")
    check_numpy(tmp_path / "new")


def test_numpy_1_is_accepted_for_any_stub(old_stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.26.4")
    check_numpy(old_stub)


def test_a_missing_numpy_is_named(old_stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigurationError, match="numpy is not installed: install 'numpy<2'"):
        check_numpy(old_stub)
