"""`inflight install-server`: what it asks pip for, and what it refuses in one sentence. The real one is in
ci/L0_supervisor/test_wheels.py."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inflight import __version__
from inflight.errors import ConfigurationError
from inflight.supervisor import install_server, installation
from inflight_client.cli import app

ROOT = Path(__file__).resolve().parents[3]
PIN = f"{install_server.PACKAGE}=={install_server.VERSION}"


class Machine:
    """An environment whose tritonserver is `server`, of which pip knows `version`; what is asked of pip is in
    `calls`, and then `server` is there unless pip `fails`."""

    def __init__(self, patch: pytest.MonkeyPatch, place: Path) -> None:
        self.server: Path | None = None
        self.version: str | None = None
        self.fails = False
        self.calls: list[list[str]] = []
        self._found = installation.find()
        self._place = place
        patch.setattr(installation, "find_tritonserver", lambda wanted=None: self._find())
        patch.setattr(importlib.metadata, "version", self._version)
        patch.setattr(subprocess, "run", self._pip)

    def _find(self) -> Path:
        if self.server is None:
            raise ConfigurationError("tritonserver is not installed")
        return self.server

    def _version(self, name: str) -> str:
        known = {"nvidia-pytriton": self.version, "numpy": "1.26.4"}.get(name)
        if known is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return known

    def _pip(self, command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        self.calls.append(command)
        if self.fails:
            return subprocess.CompletedProcess(command, 1)
        self.server, self.version = self._found.tritonserver, install_server.VERSION
        return subprocess.CompletedProcess(command, 0)

    def put_server_without_a_part(self) -> None:
        self.server = self._place / "tritonserver" / "bin" / "tritonserver"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_it_is_installed_once_without_its_own_dependencies(machine: Machine) -> None:
    assert install_server.install_server() == f"tritonserver is installed: {machine.server}"
    (command,) = machine.calls
    assert command[:4] == [sys.executable, "-m", "pip", "install"] and "--no-deps" in command and command[-1] == PIN
    assert install_server.install_server() == f"tritonserver is installed already: {machine.server}"
    assert len(machine.calls) == 1


def test_another_version_is_replaced(machine: Machine) -> None:
    machine.server, machine.version = machine._found.tritonserver, "0.6.0"
    install_server.install_server()
    assert machine.calls[0][-1] == PIN


def test_one_that_has_lost_a_part_is_installed_again(machine: Machine) -> None:
    machine.put_server_without_a_part()
    machine.version = install_server.VERSION
    install_server.install_server()
    assert machine.calls[0][-2:] == ["--force-reinstall", PIN]


def test_an_images_own_server_is_enough(machine: Machine) -> None:
    machine.server = machine._found.tritonserver
    assert "already" in install_server.install_server() and machine.calls == []


def test_a_pip_that_fails_is_one_sentence(machine: Machine) -> None:
    machine.fails = True
    done = CliRunner().invoke(app, ["install-server"])
    assert done.exit_code == 2
    assert done.stderr == "inflight: pip could not install nvidia-pytriton 0.7.0, for the reason that it gives above\n"


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("machine", "needs x86-64 Linux"),
        ("libpython", "no libpython"),
        ("pip", "there is no pip to install tritonserver with: .* -m ensurepip adds it"),
        ("environment", "belongs to the system.*: use a virtual environment, with inflight in it"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_fetched(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, sentence: str
) -> None:
    def no_libpython() -> Path:
        raise ConfigurationError("there is no libpython")

    if missing == "machine":
        monkeypatch.setattr(installation.platform, "machine", lambda: "aarch64")
    elif missing == "libpython":
        monkeypatch.setattr(installation, "find_libpython", no_libpython)
    elif missing == "pip":
        monkeypatch.setattr(install_server.importlib.util, "find_spec", lambda name: None)
    else:
        (tmp_path / "EXTERNALLY-MANAGED").touch()
        monkeypatch.setattr(sys, "prefix", sys.base_prefix)
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigurationError, match=sentence):
        install_server.install_server()
    assert machine.calls == []


def test_a_server_that_is_missing_is_one_sentence_that_names_the_command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.put_server_without_a_part()
    with pytest.raises(ConfigurationError, match=r"has no Python backend: run inflight install-server, or"):
        installation.find()
    assert "install-server" in {command.name for command in app.registered_commands}


def test_a_client_of_another_version_over_the_engines_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"inflight-client": __version__}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    installation.check_client()
    versions["inflight-client"] = "0.1.9"
    with pytest.raises(ConfigurationError, match=r"which inflight-client 0\.1\.9 has overwritten: uninstall both, and"):
        installation.check_client()


def test_the_pinned_version_is_that_of_the_constraints() -> None:
    assert PIN in (ROOT / "constraints.txt").read_text().splitlines()
