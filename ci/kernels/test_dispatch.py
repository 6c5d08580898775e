"""The public functions choose by device, and a machine without triton serves on its CPU all the same."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from kernel_cases import child_environment

import inflight_kernels
from inflight_kernels import ops, reference

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
import inflight_kernels
assert inflight_kernels.silu_and_mul(torch.zeros(1, 4)).tolist() == [[0.0, 0.0]]
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
        inflight_kernels.silu_and_mul(torch.empty(1, 4, device="meta"))


def test_cpu_tensors_go_to_the_reference_and_cuda_tensors_to_the_kernels() -> None:
    from inflight_kernels.dispatch import implementation

    assert implementation(torch.empty(0)) is reference
    if torch.cuda.is_available():
        assert implementation(torch.empty(0, device="cuda")) is ops


@pytest.mark.parametrize("name", [name for name in inflight_kernels.__all__ if hasattr(ops, name)])
def test_kernel_reference_and_public_function_take_the_same_arguments(name: str) -> None:
    public = list(inspect.signature(getattr(inflight_kernels, name)).parameters)
    assert list(inspect.signature(getattr(reference, name)).parameters) == public
    # A launcher may take more, at the end, for tests and tuning.
    assert list(inspect.signature(getattr(ops, name)).parameters)[: len(public)] == public
