"""The linear layer of fp8 with a scale for each block: kernel and reference against an exact product of the dequantised
operands, with blocks that end within the weight, and within the tiles.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, HAS_FLOAT8, assert_near
from ci.kernels.matmul.linear_cases import exact_product, poisoned_memory, random_operands
from inflight_kernels import BlockScaledWeight
from inflight_kernels.common import checks
from inflight_kernels.matmul import gpu, reference
from inflight_kernels.matmul.gpu import _linear_kernels
from inflight_kernels.matmul.gpu.block_scaled_linear import CANDIDATES, deterministic_config
from inflight_kernels.quantization import reference as quantization

pytestmark = pytest.mark.skipif(not HAS_FLOAT8, reason="this GPU cannot multiply float8_e4m3fn")

FP8 = torch.float8_e4m3fn
GROUP = 128
SMALL = dict(BLOCK_M=16, BLOCK_N=32, GROUP_N=2, num_warps=4, num_stages=2)
Operands = tuple[Tensor, Tensor, BlockScaledWeight]


def block_operands(shape: tuple[int, int, int], block_outputs: int = GROUP) -> Operands:
    """x, x_scale and weight: magnitudes differ from group to group and from block to block
    by up to a hundred, and one row of x is zeros."""
    num_tokens, out_features, in_features = shape
    x, weight = random_operands(*shape, torch.float32)
    num_groups, num_blocks = -(-in_features // GROUP), -(-out_features // block_outputs)
    x *= (10 ** (2 * torch.rand(num_tokens, num_groups) - 1)).repeat_interleave(GROUP, 1)[:, :in_features]
    x[-1] = 0.0
    of_block = 10 ** (2 * torch.rand(num_blocks, num_groups) - 1)
    weight_scale = of_block / of_block.square().mean().sqrt() / 448
    values = (weight * 448 / weight.abs().max()).to(FP8)
    weight = BlockScaledWeight(values, weight_scale, block_outputs)
    return *quantization.quantize_per_token(x, FP8, group_size=GROUP), weight


def exact(x: Tensor, x_scale: Tensor, weight: BlockScaledWeight) -> Tensor:
    """In float64, each element with the scale of its block."""
    columns, rows = torch.arange(x.shape[1]) // GROUP, torch.arange(len(weight.values)) // weight.block_outputs
    wide = weight.values.double() * weight.scales.double()[rows][:, columns]
    return exact_product(x.double() * x_scale.double()[:, columns], wide)


def scaled(expected: Tensor) -> float:
    """What tolerances are multiplied by: sums of products of other magnitudes than 1."""
    return max(float(expected.abs().max()), 1.0)


def on(device: torch.device, operands: Operands) -> Operands:
    x, x_scale, weight = operands
    moved = weight._replace(values=weight.values.to(device), scales=weight.scales.to(device))
    return x.to(device), x_scale.to(device), moved


def tolerance(device: torch.device) -> float:
    """Of a sum in float32; a GPU's matrix unit keeps about 14 bits of a group's sum."""
    return 4e-3 if device.type == "cuda" else 5e-6


@pytest.mark.parametrize("block_outputs", [128, 64, 24, 1])
@pytest.mark.parametrize("shape", [(1, 40, 128), (5, 130, 200), (34, 300, 384), (67, 33, 72), (3, 70, 641)])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_kernel_equals_exact_product(
    shape: tuple[int, int, int], block_outputs: int, out_dtype: torch.dtype, device: torch.device
) -> None:
    operands = block_operands(shape, block_outputs)
    bias = torch.randn(shape[1])
    with poisoned_memory():
        actual = gpu.block_scaled_linear(*on(device, operands), bias.to(device), out_dtype)
    assert actual.dtype == out_dtype
    expected = exact(*operands) + bias
    bound = max(ELEMENTWISE_TOLERANCE[out_dtype], tolerance(device))
    assert_near(actual.float() / scaled(expected), expected / scaled(expected), bound)


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_is_right(config: dict[str, int], device: torch.device) -> None:
    operands = block_operands((18, 200, 1400))
    expected = exact(*operands)
    with poisoned_memory():
        actual = gpu.block_scaled_linear(*on(device, operands), out_dtype=torch.float32, config=config)
    assert_near(actual / scaled(expected), expected / scaled(expected), tolerance(device))


def test_a_scale_of_another_block_is_noticed(device: torch.device) -> None:
    """Each scale multiplies its block, and no other."""
    operands = block_operands((4, 260, 300))
    expected = gpu.block_scaled_linear(*on(device, operands), out_dtype=torch.float32).cpu()
    for row in range(3):
        for group in range(3):
            x, x_scale, weight = on(device, operands)
            changed = weight._replace(scales=weight.scales.clone())
            changed.scales[row, group] *= 2
            y = gpu.block_scaled_linear(x, x_scale, changed, out_dtype=torch.float32).cpu()
            outputs = slice(128 * row, 128 * row + 128)
            assert not torch.equal(y[:-1, outputs], expected[:-1, outputs])
            y[:, outputs] = expected[:, outputs]
            assert torch.equal(y, expected)


def test_a_row_is_bitwise_the_same_in_any_batch(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    x, x_scale, weight = on(device, block_operands((70, 40, 1100), 32))
    bias = torch.randn(40, device=device)
    assert deterministic_config(40, 1100)["NUM_SPLITS"] > 1

    def rows(part: slice) -> Tensor:
        return gpu.block_scaled_linear(x[part], x_scale[part], weight, bias, torch.float32, True)

    with poisoned_memory():
        whole = rows(slice(None))
        for part in (slice(0, 1), slice(3, 22), slice(5, 70)):
            assert torch.equal(rows(part), whole[part])
        # A large batch fills the GPU with tiles, and each program adds its own splits.
        monkeypatch.setattr(_linear_kernels, "TILES_THAT_FILL", 1)
        assert torch.equal(rows(slice(None)), whole)


@pytest.mark.parametrize("block_outputs", [128, 24])
@pytest.mark.parametrize("deterministic", [False, True])
def test_reference_equals_exact_product(deterministic: bool, block_outputs: int) -> None:
    operands = block_operands((9, 133, 300), block_outputs)
    bias = torch.randn(133)
    actual = reference.block_scaled_linear(*operands, bias, torch.float32, deterministic)
    expected = exact(*operands) + bias
    assert_near(actual / scaled(expected), expected / scaled(expected), 5e-6)


def test_quantised_product_is_near_the_float_product_whatever_the_magnitudes_of_groups() -> None:
    """Where one scale for all inputs of a token would leave nothing of most of them."""
    x, weight = random_operands(8, 40, 512, torch.float32)
    scale = torch.tensor([1.0, 1e-3, 1e-6, 1e-9]).repeat_interleave(GROUP)
    quantized = quantization.quantize_per_token(x * scale, FP8, group_size=GROUP)
    values = (weight * 448 / weight.abs().max()).to(FP8)
    of_block = (weight.abs().max() / 448).expand(1, 4) / scale[::GROUP]
    packed = BlockScaledWeight(values, of_block, GROUP)
    y = reference.block_scaled_linear(*quantized, packed, None, torch.float32)
    assert ((y - x @ weight.T).square().mean().sqrt() < 0.06).item()
    q, of_token = quantization.quantize_per_token(x * scale, FP8)
    y = reference.block_scaled_linear(q, of_token[:, None].expand(8, 4), packed, None, torch.float32)
    assert ((y - x @ weight.T).square().mean().sqrt() > 0.5).item()


def test_it_is_refused_where_the_matrix_unit_has_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEFAULT_CAPABILITY", 80)
    with pytest.raises(ValueError, match=r"capability 8\.9 or newer, this one has 8\.0"):
        gpu.block_scaled_linear(*block_operands((2, 16, 128)))


def test_launcher_refuses_with_words() -> None:
    x, x_scale, weight = block_operands((2, 16, 256))
    with pytest.raises(ValueError, match=r"x must be torch\.float8_e4m3fn"):
        gpu.block_scaled_linear(x.float(), x_scale, weight)
    with pytest.raises(ValueError, match=r"weight must be torch\.float8_e4m3fn"):
        gpu.block_scaled_linear(x, x_scale, weight._replace(values=weight.values.float()))
    with pytest.raises(ValueError, match=r"x_scale must have shape \(2, 2\)"):
        gpu.block_scaled_linear(x, x_scale[:, 0], weight)
    with pytest.raises(ValueError, match=r"the scales of weight must have shape \(2, 2\)"):
        gpu.block_scaled_linear(x, x_scale, weight._replace(block_outputs=8))
    with pytest.raises(ValueError, match="block_outputs of weight must be a positive number, got 0"):
        gpu.block_scaled_linear(x, x_scale, weight._replace(block_outputs=0))
    with pytest.raises(ValueError, match="x_scale must be contiguous"):
        gpu.block_scaled_linear(x, x_scale.T.contiguous().T, weight)
    with pytest.raises(ValueError, match="out_dtype must be"):
        gpu.block_scaled_linear(x, x_scale, weight, out_dtype=torch.int8)
