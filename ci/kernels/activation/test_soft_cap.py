"""A soft cap: kernel against reference, reference against its formula."""

from __future__ import annotations

import pytest
import torch

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, assert_near
from inflight_kernels.activation import gpu, reference

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (2, 2100), (0, 8)])
@pytest.mark.parametrize("cap", [2.0, 30.0])
def test_kernel_equals_reference(shape: tuple[int, int], cap: float, dtype: torch.dtype, device: torch.device) -> None:
    # Columns of a wider tensor: the launcher must use the stride.
    x = (20 * torch.randn(shape[0], shape[1] + 3)).to(dtype)[:, 3:]
    actual = gpu.soft_cap(x.to(device), cap)
    assert actual.dtype == dtype
    # Its absolute error is a share of the cap.
    assert_near(actual.float() / cap, reference.soft_cap(x, cap).float() / cap, ELEMENTWISE_TOLERANCE[dtype])


def test_ends_of_the_range_are_the_cap_and_nan_stays(device: torch.device) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[-inf, -1e30, 0.0, 1e30, inf, nan]])
    expected = torch.tensor([[-30.0, -30.0, 0.0, 30.0, 30.0, nan]])
    for found in (gpu.soft_cap(x.to(device), 30.0).cpu(), reference.soft_cap(x, 30.0)):
        assert torch.equal(found.nan_to_num(99.0), expected.nan_to_num(99.0))


def test_reference_is_its_formula() -> None:
    x = 10 * torch.randn(4, 15)
    torch.testing.assert_close(reference.soft_cap(x, 5.0), 5 * torch.tanh(x / 5))


def test_launcher_refuses_with_words() -> None:
    with pytest.raises(ValueError, match=r"x must be \(num_tokens, width\)"):
        gpu.soft_cap(torch.randn(8), 30.0)
    with pytest.raises(ValueError, match="cap must be positive, got 0"):
        gpu.soft_cap(torch.randn(2, 8), 0.0)
