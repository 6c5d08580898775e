"""The wheel that the image installs: built from what the Dockerfile copies, and whole. Wheels that are installed are
tested in ci/L0_supervisor/test_wheels.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import inflight
import inflight_client

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
PLACES = {
    "backend/inflight": "inflight",
    "kernels/inflight_kernels": "inflight_kernels",
    "client/inflight_client": "inflight_client",
    "model_repository": "inflight_shipped/model_repository",
    **{f"backend/{name}": f"inflight_shipped/{name}" for name in ("model.py", "apis", "kubernetes", "monitoring")},
}
"""Path of the source -> its place in the wheel."""


def test_the_client_alone_is_part_of_the_engines_wheel() -> None:
    """As a package, and with what it asks for: so it runs in both as it was tested in one."""
    engine, client = (
        tomllib.loads(path.read_text())["project"] for path in (ROOT / "pyproject.toml", ROOT / "client/pyproject.toml")
    )
    asked = [*client["dependencies"], *chain(*client["optional-dependencies"].values())]
    assert len(asked) > 5 and [each for each in asked if each not in engine["dependencies"]] == []
    assert all(client[key] == engine[key] for key in ("license", "authors", "requires-python", "scripts"))
    assert inflight_client.__version__ == inflight.__version__
    assert f"\n## {inflight.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def copied_for_the_wheel() -> list[str]:
    """What the stage of the Dockerfile that builds it copies from the repository."""
    stage, _, _ = (ROOT / "Dockerfile").read_text().split(" AS wheel\n", 1)[1].partition("FROM ")
    return [path for line in stage.splitlines() if line.startswith("COPY ") for path in line.split()[1:-1]]


def files_of(place: Path, name: str) -> Iterator[str]:
    """Those of a file or folder under `place`, as they are named in the wheel, where it is called `name`."""
    if place.is_file():
        yield name
    for path in place.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"{name}/{path.relative_to(place)}"


@pytest.mark.slow
def test_the_images_wheel_has_every_file_and_no_other(tmp_path: Path) -> None:
    source, built = tmp_path / "source", tmp_path / "built"
    source.mkdir()
    for name in copied_for_the_wheel():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    tuned = source / "kernels" / "inflight_kernels" / "tuned"
    tuned.mkdir(exist_ok=True)
    (tuned / "any_device.json").write_text("{}")
    (tmp_path / "program.so").touch()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)]
    environment = {**os.environ, "INFLIGHT_LIBRARIES": str(tmp_path)}
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = built.iterdir()
    expected = [each for path, name in PLACES.items() for each in files_of(source / path, name)]
    expected.append("inflight_kernels/cpu/libraries/program.so")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        assert sorted(each for each in names if ".dist-info/" not in each) == sorted(expected)
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = packed.read(metadata).decode()
        assert "\nLicense-Expression: Apache-2.0\n" in text and (ROOT / "README.md").read_text() in text
        assert packed.read(f"{Path(metadata).parent}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
