"""Every kernel compiles for the GPUs that we serve on, spills nothing, and takes no more than the kept table says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kernel_cases import child_environment


def test_every_kernel_compiles_without_spills_or_regressions() -> None:
    # A process of its own: in this one the kernels may be interpreted instead of compiled.
    script = Path(__file__).with_name("aot.py")
    command = [sys.executable, script]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for architecture in ("sm_80", "sm_90", "sm_100"):
        assert architecture in done.stdout
