"""Sums of the squares of rows: kernel against reference."""

from __future__ import annotations

import pytest
import torch

from ci.kernels.kernel_cases import DTYPES
from inflight_kernels.norm import gpu, reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("size", [20, 576, 5000])
def test_squares_equal_the_references(size: int, with_gate: bool, dtype: torch.dtype, device: torch.device) -> None:
    # Columns of a wider tensor: the launcher must use the strides.
    wide = torch.randn(7, 3 * size + 5).to(dtype)
    first, second, gate = wide[:, 2 : size + 2], wide[:, size + 2 : 2 * size + 2], wide[:, -size:]
    gates = (gate,) if with_gate else ()
    wanted = reference.row_squares([first, second], *gates)
    got = gpu.row_squares([each.to(device) for each in (first, second)], *(each.to(device) for each in gates))
    assert got.shape == (7, 2) and got.dtype == torch.float32
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)
