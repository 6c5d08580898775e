"""The gate for what a part of a layer computes: kernel against reference, reference against its formula."""

from __future__ import annotations

import pytest
import torch

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, assert_near
from inflight_kernels.activation import gpu, reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "one_gate"), [((1, 2), True), ((3, 64), False), ((5, 1100), True), ((2, 1100), False)]
)
def test_kernel_equals_reference(
    shape: tuple[int, int], one_gate: bool, dtype: torch.dtype, device: torch.device
) -> None:
    # Columns of wider tensors: the launcher must use the strides.
    x = torch.randn(shape[0], shape[1] + 3).to(dtype)[:, 3:]
    gate = (4 * torch.randn(shape[0], shape[1] + 1)).to(dtype)[:, 1 : 2 if one_gate else None]
    actual = gpu.sigmoid_mul(x.to(device), gate.to(device))
    assert actual.dtype == dtype
    assert_near(actual, reference.sigmoid_mul(x, gate), ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_kernel_stays_finite_at_the_ends_of_the_range(device: torch.device) -> None:
    x, gate = torch.tensor([[3.0, 3.0, 3.0]]), torch.tensor([[-200.0, 0.0, 200.0]])
    assert_near(gpu.sigmoid_mul(x.to(device), gate.to(device)), torch.tensor([[0.0, 1.5, 3.0]]), 1e-6)


def test_reference_is_its_formula() -> None:
    x, gate = torch.randn(4, 15), torch.randn(4, 1)
    torch.testing.assert_close(reference.sigmoid_mul(x, gate), x / (1 + torch.exp(-gate)))


def test_a_rows_bits_in_torch_do_not_depend_on_the_other_rows() -> None:
    x, gate = torch.randn(101, 3), torch.randn(101, 1)
    whole = reference.sigmoid_mul(x, gate)
    for count in (1, 7):
        parts = zip(x.split(count), gate.split(count), strict=True)
        assert torch.equal(whole, torch.cat([reference.sigmoid_mul(*part) for part in parts]))


def test_launcher_checks_its_tensors() -> None:
    with pytest.raises(ValueError, match=r"gate must have shape \(2, 8\), got \(2, 4\)"):
        gpu.sigmoid_mul(torch.randn(2, 8), torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"gate must be torch\.float32, got torch\.float16"):
        gpu.sigmoid_mul(torch.randn(2, 8), torch.randn(2, 1).half())
