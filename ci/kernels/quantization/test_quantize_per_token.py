"""Quantisation of rows: kernel against reference bit by bit, reference against its definition.

float8 runs here through the interpreter too: `ci.kernels.interpreter` gives it a GPU's rounding, and the test below
holds that against torch's.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ci.kernels.kernel_cases import DTYPES, HAS_FLOAT8, QUANTIZED_DTYPES
from inflight_kernels.quantization import gpu, reference

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
IN_REGISTERS = {"BLOCK_K": 512, "num_warps": 4, "PROGRAMS_PER_SM": 0}
LONGER_THAN_A_BLOCK = {"BLOCK_K": 64, "num_warps": 4, "PROGRAMS_PER_SM": 0}
GIVEN = 0.013
"""A scale whose range some of the rows exceed."""


def _bits(q: Tensor) -> Tensor:
    return q.cpu().view(torch.uint8)


@triton.jit
def _to_float8_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < count, other=0.0)
    tl.store(y_ptr + offs, x.to(tl.float8e4nv), mask=offs < count)


@pytest.mark.skipif(not HAS_FLOAT8, reason="this GPU cannot convert to float8_e4m3fn")
def test_float8_is_rounded_as_torch_does(device: torch.device) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    ties = (every.sort().values[1:] + every.sort().values[:-1]) / 2
    x = torch.cat([every, ties, 100 * torch.randn(1000), torch.randn(1000) / 100]).clamp(-448.0, 448.0)
    y = torch.empty(len(x), dtype=torch.float8_e4m3fn, device=device)
    _to_float8_kernel[(1,)](x.to(device), y, len(x), BLOCK=4096)
    # A zero may lose its sign.
    assert torch.equal(y.cpu().float(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("given", [None, GIVEN], ids=["own scales", "a given one"])
@pytest.mark.parametrize("quantized", QUANTIZED_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 3, 64), (5, 257)])
@pytest.mark.parametrize("config", [None, IN_REGISTERS, LONGER_THAN_A_BLOCK])
def test_kernel_equals_reference(
    given: float | None,
    config: dict[str, int] | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quantized: torch.dtype,
    device: torch.device,
) -> None:
    x = (torch.randn(shape) * 10 ** (4 * torch.rand(shape[:-1]) - 2)[..., None]).to(dtype)
    x[0] = 0.0
    q, scale = gpu.quantize_per_token(x.to(device), quantized, given, config=config)
    wanted_q, wanted_scale = reference.quantize_per_token(x, quantized, given)
    assert q.dtype == quantized and q.shape == x.shape and scale.shape == x.shape[:-1]
    assert torch.equal(scale.cpu(), wanted_scale)
    assert torch.equal(_bits(q), _bits(wanted_q))


@pytest.mark.parametrize("quantized", QUANTIZED_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 3, 64), (5, 257), (2, 1280)])
@pytest.mark.parametrize("group_size", [32, 128])
def test_a_group_is_quantised_as_a_row_of_its_own(
    group_size: int, shape: tuple[int, ...], dtype: torch.dtype, quantized: torch.dtype, device: torch.device
) -> None:
    width, num_groups = shape[-1], -(-shape[-1] // group_size)
    of_column = (10 ** (4 * torch.rand(*shape[:-1], num_groups) - 2)).repeat_interleave(group_size, -1)[..., :width]
    x = (torch.randn(shape) * of_column).to(dtype)
    x[..., :group_size] = 0.0
    q, scale = gpu.quantize_per_token(x.to(device), quantized, group_size=group_size)
    referred = reference.quantize_per_token(x, quantized, group_size=group_size)
    assert q.dtype == quantized and q.shape == x.shape and scale.shape == (*shape[:-1], num_groups)
    for group in range(num_groups):
        columns = slice(group * group_size, (group + 1) * group_size)
        wanted_q, wanted_scale = reference.quantize_per_token(x[..., columns], quantized)
        for found_q, found_scale in ((q.cpu(), scale.cpu()), referred):
            assert torch.equal(_bits(found_q[..., columns]), _bits(wanted_q))
            assert torch.equal(found_scale[..., group], wanted_scale)


@pytest.mark.parametrize("quantized", QUANTIZED_DTYPES)
def test_rows_alone_and_in_a_batch_and_by_few_programs_are_the_same(
    quantized: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(150, 48, device=device)
    few = {"BLOCK_K": 64, "num_warps": 4, "PROGRAMS_PER_SM": 1}
    q, scale = gpu.quantize_per_token(x, quantized)
    again_q, again_scale = gpu.quantize_per_token(x, quantized, config=few)
    assert torch.equal(_bits(q), _bits(again_q)) and torch.equal(scale, again_scale)
    for row in (0, 77, 149):
        alone_q, alone_scale = gpu.quantize_per_token(x[row : row + 1], quantized)
        assert torch.equal(_bits(alone_q[0]), _bits(q[row])) and torch.equal(alone_scale[0], scale[row])


@pytest.mark.parametrize(("quantized", "largest"), LARGEST.items())
def test_reference_is_its_definition(quantized: torch.dtype, largest: float) -> None:
    x = torch.randn(20, 300) * 5
    q, scale = reference.quantize_per_token(x, quantized)
    assert torch.equal(q.float().abs().amax(1), torch.full((20,), largest))
    torch.testing.assert_close(scale, x.abs().amax(1) / largest)
    # Half a step: of 1 in int8; in e4m3 a 16th of the value, or half of the least step, 2^-9.
    allowed = torch.full_like(x, 0.5) if quantized == torch.int8 else (x / scale[:, None]).abs().div(16).clamp(2**-10)
    assert bool(((q.float() - x / scale[:, None]).abs() <= allowed * 1.0001).all())
    nothing, one = reference.quantize_per_token(torch.zeros(2, 4), quantized)
    assert not nothing.float().any() and torch.equal(one, torch.ones(2))


@pytest.mark.parametrize(("quantized", "largest"), LARGEST.items())
def test_reference_with_a_given_scale_is_its_definition(quantized: torch.dtype, largest: float) -> None:
    """In float64, whatever the row; beyond its range elements are the largest magnitude."""
    x = torch.randn(20, 300, dtype=torch.float64) * torch.logspace(-4, 2, 20)[:, None]
    q, scales = reference.quantize_per_token(x.float(), quantized, GIVEN)
    assert torch.equal(scales, torch.full((20,), GIVEN))
    exact = (x / GIVEN).clamp(-largest, largest)
    allowed = torch.full_like(x, 0.5) if quantized == torch.int8 else exact.abs().div(16).clamp(2**-10)
    assert bool(((q.double() - exact).abs() <= allowed * 1.0001).all())
    is_beyond = x.abs() > largest * GIVEN
    assert is_beyond.any() and torch.equal(q.double().abs()[is_beyond], torch.full_like(x, largest)[is_beyond])


def test_ties_go_to_even(device: torch.device) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    q, _ = gpu.quantize_per_token(x.to(device), torch.int8)
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


def test_launcher_refuses_with_words() -> None:
    with pytest.raises(ValueError, match=r"float8_e4m3fn or torch\.int8, got torch\.uint8"):
        gpu.quantize_per_token(torch.randn(2, 8), torch.uint8)
    with pytest.raises(ValueError, match="x must be float32"):
        gpu.quantize_per_token(torch.ones(2, 8, dtype=torch.int32))
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"scale must be a positive number, got {scale}"):
            gpu.quantize_per_token(torch.randn(2, 8), torch.int8, scale)
    with pytest.raises(ValueError, match="group_size must be a power of two, or 0, got 48"):
        gpu.quantize_per_token(torch.randn(2, 96), torch.int8, group_size=48)
    with pytest.raises(ValueError, match="scale must be None where there is a group_size"):
        gpu.quantize_per_token(torch.randn(2, 64), torch.int8, GIVEN, 32)
