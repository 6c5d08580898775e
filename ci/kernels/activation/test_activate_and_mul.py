"""Gated activations: kernel against reference, reference against their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, QUANTIZED_DTYPES, assert_near
from inflight_kernels import Activation
from inflight_kernels.activation import gpu, reference
from inflight_kernels.quantization.reference import quantize_per_token

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

FORMULAS: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    Activation.SILU: lambda gate, up: gate / (1 + torch.exp(-gate)) * up,
    Activation.GELU: lambda gate, up: torch.special.ndtr(gate) * gate * up,
    Activation.GELU_TANH: lambda gate, up: (
        gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    ),
    Activation.RELU: lambda gate, up: torch.where(gate > 0, gate, 0.0) * up,
    Activation.RELU_SQUARED: lambda gate, up: torch.where(gate > 0, gate**2, 0.0) * up,
    Activation.CLAMPED_SWIGLU: lambda gate, up: (
        gate.minimum(torch.tensor(7.0)) * torch.sigmoid(1.702 * gate.clamp(max=7.0)) * (up.clamp(-7.0, 7.0) + 1)
    ),
}


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 64), (5, 2 * 1536), (2, 2 * 1100)])
def test_kernel_equals_reference(
    shape: tuple[int, int], dtype: torch.dtype, activation: Activation, device: torch.device
) -> None:
    gate_up = (4 * torch.randn(shape)).to(dtype)
    actual = gpu.activate_and_mul(gate_up.to(device), activation)
    assert actual.dtype == dtype
    expected = reference.activate_and_mul(gate_up, activation).float()
    if activation is Activation.GELU:
        # Either may round 1 + erf, the sum of nearly opposite numbers where a gate is small, by half a unit of 1.
        gate, up = gate_up.float().chunk(2, -1)
        rounding = torch.finfo(torch.float32).eps * (gate * up).abs()
        expected += (actual.float().cpu() - expected).clamp(-rounding, rounding)
    assert_near(actual, expected, ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.parametrize("activation", Activation)
def test_kernel_stays_finite_at_the_ends_of_the_range(activation: Activation, device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    expected = FORMULAS[activation](*gate_up.double().chunk(2, -1))
    assert_near(gpu.activate_and_mul(gate_up.to(device), activation), expected, 1e-6)


@pytest.mark.parametrize("activation", Activation)
def test_what_is_no_number_stays_none(activation: Activation, device: torch.device) -> None:
    gate_up = torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]], device=device)
    assert bool(gpu.activate_and_mul(gate_up, activation).isnan().all())


@pytest.mark.parametrize("activation", Activation)
def test_reference_is_its_formula(activation: Activation) -> None:
    gate_up = 4 * torch.randn(4, 30)
    expected = FORMULAS[activation](*gate_up.double().chunk(2, -1))
    torch.testing.assert_close(reference.activate_and_mul(gate_up, activation), expected.float(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("quantized", QUANTIZED_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 64), (5, 2 * 300)])
@pytest.mark.parametrize("block", [None, 64])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.02}, {"group_size": 32}, {"group_size": 128, "activation": Activation.GELU_TANH}],
    ids=str,
)
def test_quantised_is_the_activation_then_quantised(
    options: dict[str, Any],
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
    q, scale = gpu.activate_and_mul_quantized(gate_up, quantized, **options, config=config)
    of_scales = {name: value for name, value in options.items() if name != "activation"}
    activated = gpu.activate_and_mul(gate_up, options.get("activation", Activation.SILU))
    wanted_q, wanted_scale = quantize_per_token(activated.cpu(), quantized, **of_scales)
    assert q.dtype == quantized and torch.equal(scale.cpu(), wanted_scale)
    assert torch.equal(q.cpu().view(torch.uint8), wanted_q.view(torch.uint8))
    like_q, like_scale = reference.activate_and_mul_quantized(gate_up.cpu(), quantized, **options)
    assert like_q.dtype == quantized
    assert_near(like_scale, scale, ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.parametrize("quantized", QUANTIZED_DTYPES)
def test_rows_alone_and_in_a_batch_are_bitwise_the_same(quantized: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(150, 64, device=device)
    y = gpu.activate_and_mul(gate_up)
    q, scale = gpu.activate_and_mul_quantized(gate_up, quantized)
    few = {"BLOCK_I": 32, "num_warps": 4, "PROGRAMS_PER_SM": 1}
    again = gpu.activate_and_mul_quantized(gate_up, quantized, config=few)
    assert torch.equal(again[0].view(torch.uint8), q.view(torch.uint8)) and torch.equal(again[1], scale)
    for row in (0, 77, 149):
        alone = gate_up[row : row + 1]
        assert torch.equal(gpu.activate_and_mul(alone)[0], y[row])
        alone_q, alone_scale = gpu.activate_and_mul_quantized(alone, quantized)
        assert torch.equal(alone_q[0].view(torch.uint8), q[row].view(torch.uint8))
        assert torch.equal(alone_scale[0], scale[row])


def test_launcher_refuses_an_odd_width() -> None:
    with pytest.raises(ValueError, match="2 \\* intermediate_size"):
        gpu.activate_and_mul(torch.randn(2, 7))
