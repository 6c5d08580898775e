"""The 8-bit linear layer: kernel against an exact product of the same quantised operands, for fp8 and int8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, assert_near
from ci.kernels.matmul.linear_cases import exact_product, poisoned_memory, random_operands
from inflight_kernels import quantize_weight
from inflight_kernels.common import checks
from inflight_kernels.matmul import gpu, reference
from inflight_kernels.matmul.gpu import _linear_kernels
from inflight_kernels.matmul.gpu.scaled_linear import CANDIDATES, deterministic_config

QUANTIZED = [torch.int8, torch.float8_e4m3fn]
SMALL = dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, GROUP_N=2, num_warps=4, num_stages=2)


def quantized_operands(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, x_scale, weight and weight_scale; one row of x is zeros."""
    x, weight = random_operands(*shape, torch.float32)
    x[-1] = 0.0
    return *quantize_weight(x, dtype), *quantize_weight(weight, dtype)


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Of a sum in float32; a GPU's matrix unit keeps about 14 bits of an fp8 sum while it adds a tile."""
    return 4e-3 if dtype == torch.float8_e4m3fn and device.type == "cuda" else 5e-6


def exact(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The product of the dequantised operands in float64."""
    return exact_product(x.double() * x_scale.double()[:, None], weight.double() * weight_scale.double()[:, None])


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("shape", [(1, 40, 72), (5, 130, 200), (34, 70, 136), (67, 33, 64)])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_kernel_equals_exact_product(
    shape: tuple[int, int, int], dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device
) -> None:
    operands = quantized_operands(shape, dtype)
    bias = torch.randn(shape[1])
    with poisoned_memory():
        actual = gpu.scaled_linear(*(t.to(device) for t in operands), bias.to(device), out_dtype)
    assert actual.dtype == out_dtype
    assert_near(actual, exact(*operands) + bias, max(ELEMENTWISE_TOLERANCE[out_dtype], tolerance(dtype, device)))


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_is_right(config: dict[str, int], dtype: torch.dtype, device: torch.device) -> None:
    operands = quantized_operands((18, 70, 600), dtype)
    actual = gpu.scaled_linear(*(t.to(device) for t in operands), out_dtype=torch.float32, config=config)
    assert_near(actual, exact(*operands), tolerance(dtype, device))


def test_int8_sums_are_exact_beyond_float32_and_alike_for_every_launch(device: torch.device) -> None:
    x = torch.full((2, 1600), 127, dtype=torch.int8)
    weight = torch.full((3, 1600), 127, dtype=torch.int8)
    weight[:, 0] = 126
    one = torch.ones(3, device=device)
    # An odd number past 2^24, where float32 has even ones only; the scale brings it back within a float's reach.
    total = 1599 * 127 * 127 + 127 * 126
    for num_splits in (1, 3):
        config = SMALL | dict(NUM_SPLITS=num_splits)
        with poisoned_memory():
            y = gpu.scaled_linear(x.to(device), one[:2], weight.to(device), one, out_dtype=torch.float32, config=config)
        assert torch.equal(y.cpu(), torch.full((2, 3), float(total)))


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_row_is_bitwise_the_same_in_any_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    x, x_scale, weight, weight_scale = (t.to(device) for t in quantized_operands((70, 40, 1100), dtype))
    bias = torch.randn(40, device=device)
    assert deterministic_config(40, 1100)["NUM_SPLITS"] > 1

    def rows(part: slice) -> Tensor:
        return gpu.scaled_linear(x[part], x_scale[part], weight, weight_scale, bias, torch.float32, True)

    with poisoned_memory():
        whole = rows(slice(None))
        for part in (slice(0, 1), slice(3, 22), slice(5, 70)):
            assert torch.equal(rows(part), whole[part])
        # A large batch fills the GPU with tiles, and each program adds its own splits.
        monkeypatch.setattr(_linear_kernels, "TILES_THAT_FILL", 1)
        assert torch.equal(rows(slice(None)), whole)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_reference_equals_exact_product(dtype: torch.dtype) -> None:
    operands = quantized_operands((9, 33, 200), dtype)
    bias = torch.randn(33)
    for deterministic in (False, True):
        actual = reference.scaled_linear(*operands, bias, torch.float32, deterministic)
        assert_near(actual, exact(*operands) + bias, 5e-6)


def test_quantised_product_is_near_the_float_product() -> None:
    x, weight = random_operands(8, 40, 512, torch.float32)
    for dtype, error in ((torch.int8, 0.03), (torch.float8_e4m3fn, 0.06)):
        y = reference.scaled_linear(*quantize_weight(x, dtype), *quantize_weight(weight, dtype), None, torch.float32)
        assert ((y - x @ weight.T).square().mean().sqrt() < error).item()


def test_fp8_is_refused_where_the_matrix_unit_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = quantized_operands((2, 16, 32), torch.float8_e4m3fn)
    monkeypatch.setattr(checks, "DEFAULT_CAPABILITY", 80)
    with pytest.raises(ValueError, match=r"capability 8\.9 or newer, this one has 8\.0: quantise to int8 instead"):
        gpu.scaled_linear(*operands)


def test_launcher_refuses_with_words() -> None:
    x, x_scale, weight, weight_scale = quantized_operands((2, 16, 32), torch.int8)
    with pytest.raises(ValueError, match="x must be float8_e4m3fn or int8"):
        gpu.scaled_linear(x.float(), x_scale, weight, weight_scale)
    with pytest.raises(ValueError, match=r"weight must be torch\.int8"):
        gpu.scaled_linear(x, x_scale, weight.to(torch.float8_e4m3fn), weight_scale)
    with pytest.raises(ValueError, match="x_scale must have shape"):
        gpu.scaled_linear(x, x_scale[:1], weight, weight_scale)
    with pytest.raises(ValueError, match="out_dtype must be"):
        gpu.scaled_linear(x, x_scale, weight, weight_scale, out_dtype=torch.int8)
