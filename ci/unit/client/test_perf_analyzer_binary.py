"""`inflight perf-analyzer`: the wheel's binary with the libraries that it asks for, without a recipe.

pytest ci/unit/client/test_perf_analyzer_binary.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.supervisor.install_server import PACKAGE, VERSION
from inflight_client import LoadTestError, perf_analyzer_binary

COMMAND = [sys.executable, "-m", "inflight_client.cli", "perf-analyzer"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.slow
def test_the_real_binary_starts_and_gets_its_arguments_as_they_are(cache: Path) -> None:
    version = run("--version")
    assert (version.returncode, version.stdout) == (0, "")
    assert version.stderr.startswith("Perf Analyzer Version 2.51.0")
    refused = run("-m", "none", "--help", "--concurrency-range=2:1", "-u", "localhost:1")
    assert "Usage: " in refused.stdout + refused.stderr and "inflight perf-analyzer" not in refused.stdout


def test_its_libraries_are_linked_once_and_again_when_they_have_moved(cache: Path) -> None:
    folder = Path(perf_analyzer_binary.environment()["LD_LIBRARY_PATH"].rpartition(":")[2])
    assert folder.is_relative_to(cache) and folder.stat().st_mode & 0o777 == 0o700
    links = {link.name: link.resolve() for link in folder.iterdir()}
    assert set(links) == {"libcudart.so.12", "libb64.so.0d"} and all(path.is_file() for path in links.values())
    (folder / "libb64.so.0d").unlink()
    (folder / "libb64.so.0d").symlink_to("/nowhere")
    perf_analyzer_binary.environment()
    assert {link.name: link.resolve() for link in folder.iterdir()} == links


def test_libraries_of_the_system_come_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own")
    assert perf_analyzer_binary.environment()["LD_LIBRARY_PATH"].startswith("/own:")


def test_without_the_wheel_that_has_them_the_systems_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"libcudart.so.12", "libb64.so.0d"}

    def load(name: str) -> None:
        if name not in present:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(perf_analyzer_binary.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(perf_analyzer_binary.ctypes, "CDLL", load)
    assert perf_analyzer_binary.environment() == dict(os.environ)
    present.remove("libb64.so.0d")
    with pytest.raises(LoadTestError, match=r"not start without libb64\.so\.0d: pip install --no-deps .* --openai URL"):
        perf_analyzer_binary.environment()
    present.clear()
    with pytest.raises(LoadTestError, match=f"libcudart.so.12 and libb64.so.0d: .*{PACKAGE}=={VERSION} brings both"):
        perf_analyzer_binary.environment()


def test_a_folder_that_others_may_write_to_is_refused(cache: Path) -> None:
    folder = Path(perf_analyzer_binary.environment()["LD_LIBRARY_PATH"].rpartition(":")[2])
    folder.chmod(0o777)
    with pytest.raises(LoadTestError, match=r"others may write to it.*set INFLIGHT_CACHE_DIR"):
        perf_analyzer_binary.environment()


def test_a_home_that_is_none_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFLIGHT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(LoadTestError, match=r"no home folder.*set INFLIGHT_CACHE_DIR"):
        perf_analyzer_binary.environment()
