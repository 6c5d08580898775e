"""SiLU-and-multiply: kernel against reference, reference against its formula."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, assert_near

from inflight_kernels import ops, reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 64), (5, 2 * 1536), (2, 2 * 1100)])
def test_kernel_equals_reference(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    gate_up = (4 * torch.randn(shape)).to(dtype)
    actual = ops.silu_and_mul(gate_up.to(device))
    assert actual.dtype == dtype
    assert_near(actual, reference.silu_and_mul(gate_up), ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_kernel_stays_finite_at_the_ends_of_the_range(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert_near(ops.silu_and_mul(gate_up.to(device)), torch.tensor([[0.0, 200.0]]), 1e-6)


def test_reference_is_its_formula() -> None:
    gate_up = torch.randn(4, 30, dtype=torch.float64)
    gate, up = gate_up[:, :15], gate_up[:, 15:]
    torch.testing.assert_close(reference.silu_and_mul(gate_up), gate / (1 + torch.exp(-gate)) * up)


def test_launcher_refuses_an_odd_width() -> None:
    with pytest.raises(ValueError, match="2 \\* intermediate_size"):
        ops.silu_and_mul(torch.randn(2, 7))
