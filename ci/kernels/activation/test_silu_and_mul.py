"""SiLU-and-multiply: kernel against reference, reference against its formula."""

from __future__ import annotations

import pytest
import torch

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, QUANTIZED_DTYPES, assert_near
from inflight_kernels.activation import gpu, reference
from inflight_kernels.quantization.reference import quantize_per_token


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 64), (5, 2 * 1536), (2, 2 * 1100)])
def test_kernel_equals_reference(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    gate_up = (4 * torch.randn(shape)).to(dtype)
    actual = gpu.silu_and_mul(gate_up.to(device))
    assert actual.dtype == dtype
    assert_near(actual, reference.silu_and_mul(gate_up), ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_kernel_stays_finite_at_the_ends_of_the_range(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert_near(gpu.silu_and_mul(gate_up.to(device)), torch.tensor([[0.0, 200.0]]), 1e-6)


def test_reference_is_its_formula() -> None:
    gate_up = torch.randn(4, 30, dtype=torch.float64)
    gate, up = gate_up[:, :15], gate_up[:, 15:]
    torch.testing.assert_close(reference.silu_and_mul(gate_up), gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("quantized", QUANTIZED_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 64), (5, 2 * 300)])
@pytest.mark.parametrize("block", [None, 64])
@pytest.mark.parametrize("given", [None, 0.02], ids=["own scales", "a given one"])
def test_quantised_is_the_activation_then_quantised(
    given: float | None,
    block: int | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    quantized: torch.dtype,
    device: torch.device,
) -> None:
    gate_up = (4 * torch.randn(shape)).to(device, dtype)
    gate_up[0] = 0.0
    # The smaller block reads the row twice.
    config = None if block is None else {"BLOCK_I": block, "num_warps": 4, "PROGRAMS_PER_SM": 0}
    q, scale = gpu.silu_and_mul_quantized(gate_up, quantized, given, config=config)
    wanted_q, wanted_scale = quantize_per_token(gpu.silu_and_mul(gate_up).cpu(), quantized, given)
    assert q.dtype == quantized and torch.equal(scale.cpu(), wanted_scale)
    assert torch.equal(q.cpu().view(torch.uint8), wanted_q.view(torch.uint8))
    like_q, like_scale = reference.silu_and_mul_quantized(gate_up.cpu(), quantized, given)
    assert like_q.dtype == quantized
    assert_near(like_scale, scale, ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.parametrize("quantized", QUANTIZED_DTYPES)
def test_rows_alone_and_in_a_batch_are_bitwise_the_same(quantized: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(150, 64, device=device)
    y = gpu.silu_and_mul(gate_up)
    q, scale = gpu.silu_and_mul_quantized(gate_up, quantized)
    few = {"BLOCK_I": 32, "num_warps": 4, "PROGRAMS_PER_SM": 1}
    again = gpu.silu_and_mul_quantized(gate_up, quantized, config=few)
    assert torch.equal(again[0].view(torch.uint8), q.view(torch.uint8)) and torch.equal(again[1], scale)
    for row in (0, 77, 149):
        alone = gate_up[row : row + 1]
        assert torch.equal(gpu.silu_and_mul(alone)[0], y[row])
        alone_q, alone_scale = gpu.silu_and_mul_quantized(alone, quantized)
        assert torch.equal(alone_q[0].view(torch.uint8), q[row].view(torch.uint8))
        assert torch.equal(alone_scale[0], scale[row])


def test_launcher_refuses_an_odd_width() -> None:
    with pytest.raises(ValueError, match="2 \\* intermediate_size"):
        gpu.silu_and_mul(torch.randn(2, 7))
