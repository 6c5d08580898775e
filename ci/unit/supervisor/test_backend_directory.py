"""Backend directories for a tritonserver that somebody else starts: where they may be made, and what a failure leaves.

pytest ci/unit/supervisor/test_backend_directory.py
"""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

import pytest

from inflight.errors import ConfigurationError
from inflight.supervisor import backend_directory, installation


def test_a_folder_that_is_new_or_empty_is_laid_out(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("link", "new/deep er"):
        made = backend_directory.lay_out(tmp_path / name)
        assert (made.backends / "inflight" / "model.py").is_file() and made.backends.is_relative_to(tmp_path / name)
        *exports, command = made.commands.splitlines()
        assert {line.split("=")[0] for line in exports} == {"export PATH", "export LD_LIBRARY_PATH"}
        assert f"--backend-directory={made.backends}" in shlex.split(command)


def test_a_relative_folder_is_printed_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) in backend_directory.lay_out(Path("here")).commands


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("full", "is not empty: name a folder"),
        ("link-to-full", "is not empty: name a folder"),
        ("file", "cannot be made: Not a directory"),
        ("file/below", "cannot be made: Not a directory"),
        ("link-to-nothing", "is a link to a folder that does not exist"),
    ],
)
def test_other_places_are_refused(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link-to-full").symlink_to("full")
    (tmp_path / "link-to-nothing").symlink_to("nothing")
    with pytest.raises(ConfigurationError, match=f"{name} {sentence}"):
        backend_directory.lay_out(tmp_path / name)
    assert (tmp_path / "full" / "mine").exists() and not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_leaves_the_place_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    copy = installation.shutil.copy2

    def fill_the_disk(source: Path, target: Path) -> object:
        if "stub" in os.fspath(source):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return copy(source, target)

    monkeypatch.setattr(installation.shutil, "copy2", fill_the_disk)
    if exists:
        (tmp_path / "place").mkdir()
    with pytest.raises(ConfigurationError, match="place cannot be made: No space left on device"):
        backend_directory.lay_out(tmp_path / "place")
    assert list(tmp_path.rglob("*")) == ([tmp_path / "place"] if exists else [])
