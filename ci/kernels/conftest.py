"""Where the kernels' tests run: on a GPU if there is one, else the same kernels under triton's interpreter on the CPU.

The interpreter is chosen when triton is first imported, so this file chooses before anything here can import it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# What the tests of this folder share is imported as ci.kernels, whatever pytest's import mode.
sys.path.insert(0, str(Path(__file__).parents[2]))

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise pytest.UsageError("triton was imported without TRITON_INTERPRET=1: run ci/kernels in its own process")
    os.environ["TRITON_INTERPRET"] = "1"
if not HAS_GPU:
    from ci.kernels.interpreter import repair

    repair()

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def device() -> torch.device:
    """Where the kernels under test run."""
    return DEVICE


@pytest.fixture(autouse=True)
def _fresh_inputs(request: pytest.FixtureRequest) -> Iterator[None]:
    """New random inputs at every run; PYTEST_SEED repeats one, which a failure prints."""
    seed = int(os.environ.get("PYTEST_SEED", int.from_bytes(os.urandom(4), "little")))
    torch.manual_seed(seed)
    request.node.add_report_section("setup", "seed", f"PYTEST_SEED={seed}")
    yield
