"""LayerNorm: kernel against reference, which is torch's own function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, assert_near
from inflight_kernels.norm import gpu, reference
from inflight_kernels.norm.gpu.rms_norm import CANDIDATES, default_config


def on(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 80), (3, 1000), (2, 3, 128), (2, 4096), (33, 16), (0, 16)])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_kernel_equals_reference(
    shape: tuple[int, ...], dtype: torch.dtype, with_residual: bool, with_bias: bool, device: torch.device
) -> None:
    x, residual = (torch.randn(2, *shape) + 3).to(dtype)
    weight, bias = torch.randn(2, shape[-1]).to(dtype)
    arguments = (weight, bias if with_bias else None)
    expected = reference.layer_norm(x, *arguments, 1e-5, residual if with_residual else None)
    x, residual, *arguments = on(device, x, residual, *arguments)
    actual = gpu.layer_norm(x, *arguments, 1e-5, residual if with_residual else None)
    if not with_residual:
        expected, actual = (expected,), (actual,)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == dtype and got.shape == wanted.shape
        assert_near(got, wanted, 2 * ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_rounds_once(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 9, 576).to(dtype)
    weight, bias = torch.randn(2, 576).to(dtype)
    normed, total = reference.layer_norm(x, weight, bias, 1e-5, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(reference.layer_norm(total, weight, bias, 1e-5), normed)
    variance, mean = torch.var_mean(total.double(), -1, keepdim=True, unbiased=False)
    exact = (total.double() - mean) / (variance + 1e-5).sqrt() * weight.double() + bias.double()
    bound = torch.finfo(dtype).eps * (exact.abs() / 2 + (2**-5 if dtype != torch.float32 else 16))
    assert bool(((normed.double() - exact).abs() <= bound).all())


def test_a_mean_far_above_the_deviation_is_subtracted_before_the_squares(device: torch.device) -> None:
    x = torch.randn(3, 256) + 1000
    exact = torch.nn.functional.layer_norm(x.double(), (256,), eps=1e-5)
    assert_near(gpu.layer_norm(x.to(device), torch.ones(256, device=device), None, 1e-5), exact, 2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_alone_and_in_a_batch_are_bitwise_the_same(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(2, 150, 100).to(device, dtype)
    weight, bias = torch.randn(2, 100).to(device, dtype)
    normed, total = gpu.layer_norm(x, weight, bias, 1e-5, residual)
    few = {**default_config(100), "PROGRAMS_PER_SM": 1}
    assert torch.equal(gpu.layer_norm(x, weight, bias, 1e-5, residual, config=few)[0], normed)
    for row in (0, 77, 149):
        alone, alone_total = gpu.layer_norm(x[row : row + 1], weight, bias, 1e-5, residual[row : row + 1])
        assert torch.equal(alone[0], normed[row]) and torch.equal(alone_total[0], total[row])


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_is_right(config: dict[str, int], device: torch.device) -> None:
    wide, residual = torch.randn(2, 3, 300)
    weight, bias = torch.randn(2, 200)
    wanted = reference.layer_norm(wide[:, 50:250], weight, bias, 1e-5, residual[:, :200])
    moved = wide.to(device)[:, 50:250], weight.to(device), bias.to(device), 1e-5, residual.to(device)[:, :200]
    for mine, theirs in zip(gpu.layer_norm(*moved, config=config), wanted, strict=True):
        assert_near(mine, theirs, 2 * ELEMENTWISE_TOLERANCE[torch.float32])


def test_launcher_refuses_with_words() -> None:
    x, weight = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(ValueError, match=r"weight must be torch\.float32"):
        gpu.layer_norm(x, weight.half(), None, 1e-6)
    with pytest.raises(ValueError, match=r"bias must have shape \(8,\)"):
        gpu.layer_norm(x, weight, weight[:7], 1e-6)
    with pytest.raises(ValueError, match="residual must have shape"):
        gpu.layer_norm(x, weight, None, 1e-6, torch.randn(3, 8))
