"""The linear layer with its activation: kernel against both done apart, in float64 and bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ci.kernels.interpreter import in_random_order
from ci.kernels.kernel_cases import DTYPES, LINEAR_CONFIG, assert_near
from ci.kernels.matmul.linear_cases import exact_product, poisoned_memory, random_operands
from inflight_kernels import Activation, tuning
from inflight_kernels.activation.gpu import activate_and_mul
from inflight_kernels.matmul import gpu, reference
from inflight_kernels.matmul.gpu import _linear_kernels
from inflight_kernels.matmul.gpu.gated_linear import CANDIDATES, fixed_config

# Each factor is rounded before it is multiplied.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 80, 72), (33, 70, 129), (17, 2, 8)])
def test_kernel_equals_exact_product(
    shape: tuple[int, int, int], dtype: torch.dtype, with_bias: bool, device: torch.device
) -> None:
    x, weight = random_operands(*shape, dtype)
    bias = torch.randn(shape[1]).to(dtype) if with_bias else None
    on_device = (x.to(device), weight.to(device), None if bias is None else bias.to(device))
    with poisoned_memory():
        actual = gpu.gated_linear(*on_device, config=LINEAR_CONFIG)
    assert actual.dtype == dtype
    gate, up = exact_product(x, weight, bias).chunk(2, dim=1)
    assert_near(actual, F.silu(gate) * up, TOLERANCE[dtype])
    assert_near(reference.gated_linear(x, weight, bias), F.silu(gate) * up, TOLERANCE[dtype])


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_bits_are_those_of_the_two_operations(num_splits: int, activation: Activation, device: torch.device) -> None:
    x, weight = (t.to(device) for t in random_operands(19, 140, 9 * 32 + 4, torch.float16))
    bias = torch.randn(140).to(device, torch.float16)
    config = LINEAR_CONFIG | {"NUM_SPLITS": num_splits}
    apart = activate_and_mul(gpu.linear(x, weight, bias, config=config), activation)
    with poisoned_memory(), in_random_order():
        gated = gpu.gated_linear(x, weight, bias, activation=activation, config=config)
    assert torch.equal(gated, apart)


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_is_right(config: dict[str, int], device: torch.device) -> None:
    x, weight = random_operands(18, 140, 600, torch.float16)
    actual = gpu.gated_linear(x.to(device), weight.to(device), config=config)
    assert_near(actual, reference.gated_linear(x.float(), weight.float()), TOLERANCE[torch.float16])


def test_a_row_is_bitwise_the_same_in_any_batch(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    x, weight = (t.to(device) for t in random_operands(70, 80, 520, torch.float32))
    assert fixed_config(40, 520, 4)["NUM_SPLITS"] > 1
    with poisoned_memory():
        whole = gpu.gated_linear(x, weight, deterministic=True)
        for rows in (slice(0, 1), slice(3, 22)):
            assert torch.equal(gpu.gated_linear(x[rows], weight, deterministic=True), whole[rows])
        # A large batch fills the GPU with tiles, and each program adds its own splits.
        monkeypatch.setattr(_linear_kernels, "TILES_THAT_FILL", 1)
        assert torch.equal(gpu.gated_linear(x, weight, deterministic=True), whole)


def test_the_table_chooses_between_the_kernel_and_torch(device: torch.device) -> None:
    x, weight = (t.to(device) for t in random_operands(65, 48, 32, torch.float32))
    apart = activate_and_mul(F.linear(x, weight))
    assert torch.equal(gpu.gated_linear(x[:64], weight), activate_and_mul(F.linear(x[:64], weight))), "no table"
    with tuning.trying("gated_linear", LINEAR_CONFIG) as shapes:
        assert torch.equal(gpu.gated_linear(x, weight), apart)
        assert not shapes, "so many tokens are not looked up"
        assert_near(gpu.gated_linear(x[:3], weight), apart[:3].cpu(), TOLERANCE[torch.float32])
    assert shapes == {(("m", "16"), ("n", 48), ("k", 32), ("dtype", "torch.float32"))}
    assert gpu.gated_linear(x[:0], weight).shape == (0, 24)


def test_launcher_refuses_with_words() -> None:
    x, weight = random_operands(2, 7, 16, torch.float32)
    with pytest.raises(ValueError, match="as many rows for the gate as for up, got 7"):
        gpu.gated_linear(x, weight)
