"""The wheel that the image installs: built from what the Dockerfile copies, and whole."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
WANTED = (
    "inflight/worker.py",
    "inflight/py.typed",
    "inflight_shipped/model.py",
    "inflight_shipped/monitoring/alerts.yml",
    "inflight_shipped/apis/vllm/vllm_model/config.pbtxt",
    "inflight_shipped/model_repository/llm/config.pbtxt",
    "inflight_shipped/model_repository/llm/1/checkpoint/model.safetensors",
    "inflight_shipped/model_repository/llm/1/adapters/pirate/adapter_model.safetensors",
    "inflight_client/py.typed",
    "inflight_kernels/py.typed",
    "inflight_kernels/tuned/any_device.json",
)


def copied_for_the_wheel() -> list[str]:
    """What the Dockerfile's first stage copies from the repository."""
    first, _, _ = (ROOT / "Dockerfile").read_text().split("FROM ", 1)[1].partition("FROM ")
    return [path for line in first.splitlines() if line.startswith("COPY ") for path in line.split()[1:-1]]


def test_the_images_wheel_is_whole(tmp_path: Path) -> None:
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
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = built.iterdir()
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        assert [name for name in WANTED if name not in names] == []
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        assert (ROOT / "README.md").read_text() in packed.read(metadata).decode()
