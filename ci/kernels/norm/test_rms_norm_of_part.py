"""The norm of columns of which ranks have parts: kernels against reference, reference against norms of all columns."""

from __future__ import annotations

import pytest
import torch

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, assert_near
from inflight_kernels import PartSquares
from inflight_kernels.norm import gpu, reference
from inflight_kernels.recurrent.reference import gated_rms_norm

GATES = ("none", "before", "behind")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", ["as x", torch.float32], ids=str)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("size", [20, 1500])
def test_kernel_equals_reference(
    size: int, gate: str, weight_dtype: torch.dtype | str, dtype: torch.dtype, device: torch.device
) -> None:
    x, share = torch.randn(5, size + 3).to(dtype)[:, 3:], (3 * torch.randn(5, size + 1)).to(dtype)[:, 1:]
    weight = torch.randn(size).to(weight_dtype if isinstance(weight_dtype, torch.dtype) else dtype)
    sums, options = size * torch.rand(5, 6), (None if gate == "none" else share, gate == "before")
    wanted = reference.rms_norm_of_part(x, weight, 1e-5, PartSquares(sums, range(1, 6, 2), 3 * size), *options)
    squares = PartSquares(sums.to(device), range(1, 6, 2), 3 * size)
    on_device = (None if gate == "none" else share.to(device), gate == "before")
    got = gpu.rms_norm_of_part(x.to(device), weight.to(device), 1e-5, squares, *on_device)
    assert got.dtype == dtype
    assert_near(got, wanted, 3 * ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.parametrize("gate", GATES)
def test_parts_are_those_of_the_norm(gate: str) -> None:
    x, share, weight = torch.randn(9, 96), torch.randn(9, 96), torch.randn(96)
    parts, shares = x.split([40, 24, 32], 1), share.split([40, 24, 32], 1)
    first = gate == "before"
    sums = torch.cat(
        [reference.row_squares([part], own if first else None) for part, own in zip(parts, shares, strict=True)], 1
    )
    found = [
        reference.rms_norm_of_part(
            part, own_weight, 1e-5, PartSquares(sums, range(3), 96), None if gate == "none" else own, first
        )
        for part, own, own_weight in zip(parts, shares, weight.split([40, 24, 32]), strict=True)
    ]
    whole = reference.rms_norm(x, weight, 1e-5)
    if gate != "none":
        whole = gated_rms_norm(x, share, weight, 1e-5, gate_first=first)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_alone_and_in_a_batch_are_bitwise_the_same(dtype: torch.dtype, device: torch.device) -> None:
    x, gate = torch.randn(2, 40, 3000).to(device, dtype)
    weight, sums = torch.randn(3000).to(device, dtype), gpu.row_squares([x], gate)
    together = gpu.rms_norm_of_part(x, weight, 1e-6, PartSquares(sums, range(1), 3000), gate, True)
    for row in (0, 17, 39):
        own = slice(row, row + 1)
        alone = gpu.row_squares([x[own]], gate[own])
        assert torch.equal(alone[0], sums[row])
        normed = gpu.rms_norm_of_part(x[own], weight, 1e-6, PartSquares(alone, range(1), 3000), gate[own], True)
        assert torch.equal(normed[0], together[row])


def test_launchers_refuse_with_words() -> None:
    x, sums = torch.randn(2, 12), torch.rand(2, 3)
    with pytest.raises(ValueError, match=r"x must be \(2, columns\), got \(3, 12\)"):
        gpu.row_squares([x, torch.randn(3, 12)])
    with pytest.raises(ValueError, match=r"gate must have shape \(2, 12\), got \(2, 11\)"):
        gpu.row_squares([x], x[:, 1:])
    with pytest.raises(ValueError, match=r"sums_TP must be \(2, columns\) with those of range\(0, 4\), got \(2, 3\)"):
        gpu.rms_norm_of_part(x, torch.ones(12), 1e-6, PartSquares(sums, range(4), 48))
    with pytest.raises(ValueError, match=r"weight must have shape \(12,\)"):
        gpu.rms_norm_of_part(x, torch.ones(11), 1e-6, PartSquares(sums, range(3), 36))
