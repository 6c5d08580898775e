"""RMSNorm: kernel against reference, reference against Hugging Face's own module."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, assert_near
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from inflight_kernels import ops, reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 80), (5, 576), (3, 1000), (2, 3, 128), (2, 4096), (33, 16)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_kernel_equals_reference(
    shape: tuple[int, ...], dtype: torch.dtype, with_residual: bool, device: torch.device
) -> None:
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    given = (residual,) if with_residual else ()
    expected = reference.rms_norm(x, weight, 1e-5, *given)
    actual = ops.rms_norm(x.to(device), weight.to(device), 1e-5, *(r.to(device) for r in given))
    if not with_residual:
        expected, actual = (expected,), (actual,)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == dtype and got.shape == wanted.shape
        assert_near(got, wanted, ELEMENTWISE_TOLERANCE[dtype])


def test_kernel_takes_rows_of_a_wider_buffer(device: torch.device) -> None:
    wide = torch.randn(6, 200)
    weight = torch.randn(96)
    actual = ops.rms_norm(wide.to(device)[:, 50:146], weight.to(device), 1e-6)
    assert_near(actual, reference.rms_norm(wide[:, 50:146], weight, 1e-6), ELEMENTWISE_TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_rounds_like_hugging_face(dtype: torch.dtype) -> None:
    module = LlamaRMSNorm(576, eps=1e-5)
    module.weight.data = torch.randn(576).to(dtype)
    x, residual = torch.randn(2, 9, 576).to(dtype)
    with torch.no_grad():
        assert torch.equal(reference.rms_norm(x, module.weight, 1e-5), module(x))
        normed, total = reference.rms_norm(x, module.weight, 1e-5, residual)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, module(x + residual))


def test_launcher_refuses_with_words() -> None:
    with pytest.raises(ValueError, match=r"weight must be torch\.float32"):
        ops.rms_norm(torch.randn(2, 8), torch.randn(8).half(), 1e-6)
    with pytest.raises(ValueError, match="residual must have shape"):
        ops.rms_norm(torch.randn(2, 8), torch.randn(8), 1e-6, torch.randn(3, 8))
