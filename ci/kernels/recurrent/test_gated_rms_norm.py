"""The norm with a gate: kernel against reference, reference against transformers' modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, assert_near
from inflight_kernels import Gate
from inflight_kernels.recurrent import gpu, reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Gate)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("weight_dtype", ["as x", torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "width", "group_size", "weight_size"), [(3, 96, None, 32), (5, 60, 20, 60), (2, 4100, 4100, 4100)]
)
def test_kernel_equals_reference(
    tokens: int,
    width: int,
    group_size: int | None,
    weight_size: int,
    weight_dtype: torch.dtype | str,
    gate_first: bool,
    activation: Gate,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    # Columns of wider tensors: the launcher must use the strides.
    x, gate = torch.randn(tokens, width + 3).to(dtype)[:, 3:], (3 * torch.randn(tokens, width + 1)).to(dtype)[:, 1:]
    weight = torch.randn(weight_size).to(weight_dtype if isinstance(weight_dtype, torch.dtype) else dtype)
    options = (1e-5, activation, group_size, gate_first)
    wanted = reference.gated_rms_norm(x, gate, weight, *options)
    got = gpu.gated_rms_norm(x.to(device), gate.to(device), weight.to(device), *options)
    assert got.dtype == dtype
    assert_near(got, wanted, 3 * ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_alone_and_in_a_batch_are_bitwise_the_same(dtype: torch.dtype, device: torch.device) -> None:
    x, gate = torch.randn(2, 40, 96).to(device, dtype)
    weight = torch.randn(32).to(device, dtype)
    together = gpu.gated_rms_norm(x, gate, weight, 1e-6)
    for row in (0, 17, 39):
        assert torch.equal(gpu.gated_rms_norm(x[row : row + 1], gate[row : row + 1], weight, 1e-6)[0], together[row])


def _with_weight(module: torch.nn.Module, weight: Tensor) -> torch.nn.Module:
    module.weight.data = weight
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_reference_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    x, gate = torch.randn(2, 7, 96).to(dtype)
    weight, weight_of_all = torch.randn(32).to(dtype), torch.randn(96).to(dtype)
    heads = x.view(7, 3, 32), gate.view(7, 3, 32)
    qwen = _with_weight(Qwen3_5RMSNormGated(32, eps=1e-5), weight)(*heads).flatten(1)
    kimi = _with_weight(KimiLinearRMSNormGated(32, eps=1e-5), weight)(*heads).flatten(1)
    grouped = _with_weight(Zamba2RMSNormGated(96, 48, eps=1e-5), weight_of_all)(x, gate)
    found = (
        reference.gated_rms_norm(x, gate, weight, 1e-5),
        reference.gated_rms_norm(x, gate, weight.float(), 1e-5, Gate.SIGMOID),
        reference.gated_rms_norm(x, gate, weight_of_all, 1e-5, group_size=48, gate_first=True),
    )
    for mine, theirs in zip(found, (qwen, kimi, grouped), strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        else:
            # Where float32 adds up in another order, a tie may fall otherwise.
            assert (mine == theirs).float().mean() > 0.99


def test_launcher_refuses_with_words() -> None:
    x, weight = torch.randn(2, 12), torch.randn(4)
    with pytest.raises(ValueError, match="12 columns are not groups of 5 with a weight of 5"):
        gpu.gated_rms_norm(x, x, torch.randn(5), 1e-6)
    with pytest.raises(ValueError, match="12 columns are not groups of 6 with a weight of 4"):
        gpu.gated_rms_norm(x, x, weight, 1e-6, group_size=6)
    with pytest.raises(ValueError, match=r"gate must have shape \(2, 12\), got \(2, 11\)"):
        gpu.gated_rms_norm(x, x[:, 1:], weight, 1e-6)
    with pytest.raises(ValueError, match=r"weight must be torch\.float32 or float32, got torch\.float16"):
        gpu.gated_rms_norm(x, x, weight.half(), 1e-6)
