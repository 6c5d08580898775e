"""What an editable install puts on the import path: our packages, and nothing that others could take for their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import importlib.util, sys
import inflight, inflight_client, inflight_kernels
for package in (inflight, inflight_client, inflight_kernels):
    print(package.__file__)
print([name for name in ("model", "apis") if importlib.util.find_spec(name)])
"""


def test_our_packages_are_found_and_no_bare_model_is() -> None:
    """tritonserver appends a backend's folder to the path and imports `model`: the first one on the path."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM], cwd="/", capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    *places, others = done.stdout.splitlines()
    assert [Path(place).relative_to(ROOT).parts[0] for place in places] == ["backend", "client", "kernels"]
    assert others == "[]"
