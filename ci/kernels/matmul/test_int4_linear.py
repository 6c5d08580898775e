"""The 4-bit linear layer: kernel against an exact product of the dequantised weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ci.kernels.kernel_cases import DTYPES, assert_near
from ci.kernels.matmul.linear_cases import LINEAR_TOLERANCE, exact_product, poisoned_memory
from inflight_kernels import Int4Weight, pack_int4
from inflight_kernels.matmul import gpu, reference
from inflight_kernels.matmul.gpu import _linear_kernels
from inflight_kernels.matmul.gpu.int4_linear import CANDIDATES, deterministic_config

HALF_DTYPES = [dtype for dtype in DTYPES if dtype != torch.float32]
SMALL = dict(BLOCK_M=16, BLOCK_N=32, GROUP_N=2, num_warps=4, num_stages=2)


def random_weight(out_features: int, in_features: int, group_size: int, dtype: torch.dtype) -> Int4Weight:
    """A 4-bit weight whose product with a normal x is about 1; zero points take their whole range, 0 to 16."""
    groups = in_features // group_size
    scales = (torch.rand(groups, out_features) + 0.5) / (6 * in_features**0.5)
    zeros = torch.randint(0, 17, (groups, out_features))
    return pack_int4(torch.randint(0, 16, (out_features, in_features)), scales.to(dtype), zeros)


def to(weight: Int4Weight, device: torch.device) -> Int4Weight:
    return Int4Weight(*(t.to(device) if isinstance(t, Tensor) else t for t in weight))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(
    ("shape", "group_size"),
    [((1, 40, 128), 128), ((5, 130, 384), 128), ((18, 72, 224), 32), ((33, 33, 320), 64), ((65, 40, 288), 96)],
)
def test_kernel_equals_exact_product(
    shape: tuple[int, int, int], group_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    num_tokens, out_features, in_features = shape
    weight = random_weight(out_features, in_features, group_size, dtype)
    x, bias = torch.randn(num_tokens, in_features).to(dtype), torch.randn(out_features).to(dtype)
    expected = exact_product(x, weight.dequantize(), bias)
    with poisoned_memory():
        actual = gpu.int4_linear(x.to(device), to(weight, device), bias.to(device))
    assert actual.dtype == dtype
    assert_near(actual, expected, LINEAR_TOLERANCE[dtype])


@pytest.mark.parametrize("num_splits", [2, 3, 8])
def test_any_number_of_splits_adds_up(num_splits: int, device: torch.device) -> None:
    weight = random_weight(70, 928, 32, torch.float16)
    x = torch.randn(19, 928).half()
    with poisoned_memory():
        actual = gpu.int4_linear(x.to(device), to(weight, device), config=SMALL | dict(NUM_SPLITS=num_splits))
    assert_near(actual, exact_product(x, weight.dequantize()), LINEAR_TOLERANCE[torch.float16])


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_is_right(config: dict[str, int], device: torch.device) -> None:
    weight = random_weight(70, 640, 128, torch.float16)
    x = torch.randn(18, 640).half()
    actual = gpu.int4_linear(x.to(device), to(weight, device), config=config)
    assert_near(actual, exact_product(x, weight.dequantize()), LINEAR_TOLERANCE[torch.float16])


def test_columns_reordered_by_activation_are_read_in_their_order(device: torch.device) -> None:
    weight = random_weight(24, 256, 64, torch.float16)
    permutation = torch.randperm(256)
    x = torch.randn(3, 256).half()
    expected = exact_product(x[:, permutation], weight.dequantize())
    reordered = weight._replace(permutation=permutation)
    assert_near(gpu.int4_linear(x.to(device), to(reordered, device)), expected, LINEAR_TOLERANCE[torch.float16])
    assert_near(reference.int4_linear(x, reordered), expected, LINEAR_TOLERANCE[torch.float16])


def test_a_row_is_bitwise_the_same_in_any_batch(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    weight = to(random_weight(40, 2048, 128, torch.float16), device)
    x = torch.randn(70, 2048).half().to(device)
    assert deterministic_config(40, 2048)["NUM_SPLITS"] > 1
    with poisoned_memory():
        whole = gpu.int4_linear(x, weight, deterministic=True)
        for rows in (slice(0, 1), slice(3, 22), slice(5, 70)):
            assert torch.equal(gpu.int4_linear(x[rows], weight, deterministic=True), whole[rows])
        # A large batch fills the GPU with tiles, and each program adds its own splits.
        monkeypatch.setattr(_linear_kernels, "TILES_THAT_FILL", 1)
        assert torch.equal(gpu.int4_linear(x, weight, deterministic=True), whole)


def test_launcher_refuses_with_words() -> None:
    weight = random_weight(16, 128, 64, torch.float16)
    x = torch.randn(2, 128).half()
    with pytest.raises(ValueError, match="x must be float16 or bfloat16"):
        gpu.int4_linear(x.float(), weight)
    with pytest.raises(ValueError, match=r"x must be \(num_tokens, 128\)"):
        gpu.int4_linear(x[:, :64], weight)
    with pytest.raises(ValueError, match=r"packed for torch\.float16, got x of torch\.bfloat16"):
        gpu.int4_linear(x.bfloat16(), weight)
    with pytest.raises(ValueError, match="scale_zero must have shape"):
        gpu.int4_linear(x, weight._replace(qweight=weight.qweight[:, :8]))
    with pytest.raises(ValueError, match="bias must"):
        gpu.int4_linear(x, weight, torch.zeros(15).half())
