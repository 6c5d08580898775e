"""The public functions choose by device, and a machine without triton serves on its CPU all the same."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import inflight_kernels
from ci.kernels.kernel_cases import child_environment
from inflight_kernels.dispatch import implementation

PACKAGE = Path(inflight_kernels.__file__).parent
FAMILIES = sorted(f"inflight_kernels.{path.parent.name}" for path in PACKAGE.glob("*/reference.py"))

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
import inflight_kernels
assert inflight_kernels.activate_and_mul(torch.zeros(1, 4)).tolist() == [[0.0, 0.0]]
greedy, nothing = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
tokens, _ = inflight_kernels.sample(
    torch.tensor([[1.0, 3.0, 2.0]]), greedy, nothing.int(), greedy + 1, greedy, nothing, nothing
)
assert tokens.tolist() == [1]
"""


def test_a_cpu_needs_no_triton() -> None:
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_device_without_an_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="runs on cpu and cuda tensors, got one on meta"):
        inflight_kernels.activate_and_mul(torch.empty(1, 4, device="meta"))


def test_cpu_tensors_go_to_the_reference_and_cuda_tensors_to_the_kernels() -> None:
    family = "inflight_kernels.norm"
    assert implementation(torch.empty(0), family).__name__ == f"{family}.reference"
    if torch.cuda.is_available():
        assert implementation(torch.empty(0, device="cuda"), family).__name__ == f"{family}.gpu"


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_references_and_public_functions_take_the_same_arguments(family: str) -> None:
    api, gpu, reference = (importlib.import_module(name) for name in (family, f"{family}.gpu", f"{family}.reference"))
    assert gpu.__all__
    for name in gpu.__all__:
        public = list(inspect.signature(getattr(api, name)).parameters)
        assert getattr(inflight_kernels, name) is getattr(api, name)
        assert list(inspect.signature(getattr(reference, name)).parameters) == public
        # A launcher may take more, at the end, for tests and tuning.
        assert list(inspect.signature(getattr(gpu, name)).parameters)[: len(public)] == public
