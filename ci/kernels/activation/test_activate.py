"""Activations without a gate: kernel against reference, which is that of gated ones beside an `up` of 1."""

from __future__ import annotations

import pytest
import torch

import inflight_kernels
from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, assert_near
from inflight_kernels import Activation
from inflight_kernels.activation import gpu, reference

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

OF_ANY_LAYER = [each for each in Activation if each is not Activation.CLAMPED_SWIGLU]


@pytest.mark.parametrize("activation", OF_ANY_LAYER)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (5, 1536), (0, 8)])
def test_kernel_equals_reference(
    shape: tuple[int, int], dtype: torch.dtype, activation: Activation, device: torch.device
) -> None:
    x = (4 * torch.randn(shape)).to(dtype)
    expected = reference.activate(x, activation)
    assert torch.equal(expected, reference.activate_and_mul(torch.cat([x, torch.ones_like(x)], 1), activation))
    actual = gpu.activate(x.to(device), activation)
    assert actual.dtype == dtype
    assert_near(actual, expected, ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.parametrize("activation", OF_ANY_LAYER)
def test_columns_of_a_wider_buffer_in_any_blocks_have_the_bits_of_a_row_alone(
    activation: Activation, device: torch.device
) -> None:
    x = torch.randn(9, 200, device=device)[:, 50:146]
    y = gpu.activate(x, activation)
    assert torch.equal(gpu.activate(x, activation, config={"BLOCK_I": 32, "num_warps": 4}), y)
    for row in (0, 8):
        assert torch.equal(gpu.activate(x[row : row + 1].contiguous(), activation)[0], y[row])


def test_gated_layers_alone_have_the_clamped_one() -> None:
    with pytest.raises(ValueError, match="clamped_swiglu is for gated layers only"):
        inflight_kernels.activate(torch.randn(2, 8), Activation.CLAMPED_SWIGLU)


def test_launcher_refuses_with_words() -> None:
    with pytest.raises(ValueError, match=r"must be \(num_tokens, intermediate_size\)"):
        gpu.activate(torch.randn(8), Activation.GELU)
