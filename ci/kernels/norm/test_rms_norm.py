"""RMSNorm: kernel against reference, reference against Hugging Face's own module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, QUANTIZED_DTYPES, assert_near
from inflight_kernels.norm import gpu, reference
from inflight_kernels.norm.gpu.rms_norm import CANDIDATES, default_config
from inflight_kernels.quantization.reference import quantize_per_token

OPTIONS: tuple[dict[str, Any], ...] = ({}, {"scale": 0.005}, {"group_size": 32}, {"group_size": 128})
"""Each row has a scale of its own; all have one, whose range some elements exceed; and each group has one."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 80), (5, 576), (3, 1000), (2, 3, 128), (2, 4096), (33, 16)])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_float_weight", [False, True])
def test_kernel_equals_reference(
    shape: tuple[int, ...], dtype: torch.dtype, with_residual: bool, with_float_weight: bool, device: torch.device
) -> None:
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(torch.float32 if with_float_weight else dtype)
    given = (residual,) if with_residual else ()
    expected = reference.rms_norm(x, weight, 1e-5, *given)
    actual = gpu.rms_norm(x.to(device), weight.to(device), 1e-5, *(r.to(device) for r in given))
    if not with_residual:
        expected, actual = (expected,), (actual,)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == dtype and got.shape == wanted.shape
        assert_near(got, wanted, ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_normalised_to_the_bits_of_the_norm_of_their_rows(
    dtype: torch.dtype, device: torch.device
) -> None:
    table, weight = torch.randn(50, 80).to(device, dtype), torch.randn(80).to(device, dtype)
    for count in (0, 1, 33):
        token_ids = torch.randint(0, 50, (count,)).to(device)
        normed, rows = gpu.embedding_rms_norm(token_ids, table, weight, 1e-6)
        assert torch.equal(rows, table[token_ids])
        assert torch.equal(normed, gpu.rms_norm(table[token_ids], weight, 1e-6))
        expected = reference.embedding_rms_norm(token_ids, table, weight, 1e-6)
        assert_near(normed, expected[0], ELEMENTWISE_TOLERANCE[dtype])
        assert torch.equal(rows, expected[1])


def test_kernel_takes_rows_of_a_wider_buffer(device: torch.device) -> None:
    wide = torch.randn(6, 200)
    weight = torch.randn(96)
    actual = gpu.rms_norm(wide.to(device)[:, 50:146], weight.to(device), 1e-6)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reference_rounds_once_beside_a_float32_weight_as_gemma_does(dtype: torch.dtype) -> None:
    module = GemmaRMSNorm(576, eps=1e-5)
    module.weight.data = torch.randn(576)
    x = torch.randn(9, 576).to(dtype)
    with torch.no_grad():
        assert torch.equal(reference.rms_norm(x, 1 + module.weight, 1e-5), module(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_float32_weight_leaves_one_rounding(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(5, 576).to(dtype), torch.randn(576)
    exact = torch.nn.functional.rms_norm(x.double(), (576,), weight.double(), 1e-5)
    found = gpu.rms_norm(x.to(device), weight.to(device), 1e-5).cpu()
    # Elsewhere float32's sum and root decide a tie.
    assert (found == exact.to(dtype)).float().mean() > (0.99 if dtype != torch.float32 else 0.3)


@pytest.mark.parametrize("quantized", QUANTIZED_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "with_residual", "with_float_weight"),
    [((1, 64), False, False), ((5, 576), True, False), ((2, 3, 1000), True, False), ((5, 576), True, True)],
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_quantised_is_the_norm_then_quantised(
    options: dict[str, Any],
    shape: tuple[int, ...],
    with_residual: bool,
    with_float_weight: bool,
    dtype: torch.dtype,
    quantized: torch.dtype,
    device: torch.device,
) -> None:
    x, residual = torch.randn(2, *shape).to(device, dtype)
    weight = torch.randn(shape[-1]).to(device, torch.float32 if with_float_weight else dtype)
    given = residual if with_residual else None
    config = default_config(shape[-1])
    q, scale, *total = gpu.rms_norm_quantized(x, weight, 1e-5, given, quantized, **options, config=config)
    apart = gpu.rms_norm(x, weight, 1e-5, given, config=config)
    normed = apart[0] if with_residual else apart
    wanted_q, wanted_scale = quantize_per_token(normed.cpu(), quantized, **options)
    assert q.dtype == quantized and torch.equal(scale.cpu(), wanted_scale)
    assert torch.equal(q.cpu().view(torch.uint8), wanted_q.view(torch.uint8))
    assert len(total) == with_residual
    if with_residual:
        assert torch.equal(total[0], apart[1])
    # And the reference is the same two steps, a rounding of the norm apart.
    on_cpu = (x.cpu(), weight.cpu(), 1e-5, None if given is None else given.cpu())
    like = reference.rms_norm_quantized(*on_cpu, quantized, **options)
    assert len(like) == 2 + with_residual and like[0].dtype == quantized
    assert_near(like[1], scale, 2 * ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.parametrize("quantized", QUANTIZED_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_so_are_quantised_embeddings(
    options: dict[str, Any], dtype: torch.dtype, quantized: torch.dtype, device: torch.device
) -> None:
    table, weight = torch.randn(50, 80).to(device, dtype), torch.randn(80).to(device, dtype)
    for count in (0, 1, 33):
        token_ids = torch.randint(0, 50, (count,)).to(device)
        q, scale, rows = gpu.embedding_rms_norm_quantized(token_ids, table, weight, 1e-6, quantized, **options)
        wanted_q, wanted_scale = gpu.rms_norm_quantized(table[token_ids], weight, 1e-6, None, quantized, **options)
        assert torch.equal(rows, table[token_ids])
        assert q.dtype == quantized and torch.equal(q.view(torch.uint8), wanted_q.view(torch.uint8))
        assert scale.shape[0] == count and torch.equal(scale, wanted_scale)
        arguments = (token_ids.cpu(), table.cpu(), weight.cpu(), 1e-6)
        like = reference.embedding_rms_norm_quantized(*arguments, quantized, **options)
        apart = quantize_per_token(reference.embedding_rms_norm(*arguments)[0], quantized, **options)
        assert torch.equal(like[0].view(torch.uint8), apart[0].view(torch.uint8)) and torch.equal(like[1], apart[1])
        assert torch.equal(like[2], rows.cpu())
        assert_near(like[1], scale, 2 * ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_alone_and_in_a_batch_are_bitwise_the_same(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(2, 150, 100).to(device, dtype)
    weight = torch.randn(100).to(device, dtype)
    normed, total = gpu.rms_norm(x, weight, 1e-5, residual)
    # Persistent programs, which process several rows each, give the same results.
    few = {**default_config(100), "PROGRAMS_PER_SM": 1}
    assert torch.equal(gpu.rms_norm(x, weight, 1e-5, residual, config=few)[0], normed)
    for row in (0, 77, 149):
        alone, alone_total = gpu.rms_norm(x[row : row + 1], weight, 1e-5, residual[row : row + 1])
        assert torch.equal(alone[0], normed[row]) and torch.equal(alone_total[0], total[row])


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_is_right(config: dict[str, int], device: torch.device) -> None:
    x, residual = torch.randn(2, 3, 200)
    weight = torch.randn(200)
    wanted = reference.rms_norm(x, weight, 1e-5, residual)
    got = gpu.rms_norm(x.to(device), weight.to(device), 1e-5, residual.to(device), config=config)
    for mine, theirs in zip(got, wanted, strict=True):
        assert_near(mine, theirs, ELEMENTWISE_TOLERANCE[torch.float32])


def test_launcher_refuses_with_words() -> None:
    with pytest.raises(ValueError, match=r"weight must be torch\.float32"):
        gpu.rms_norm(torch.randn(2, 8), torch.randn(8).half(), 1e-6)
    with pytest.raises(ValueError, match=r"weight must be torch\.float16"):
        gpu.rms_norm(torch.randn(2, 8).half(), torch.randn(8).bfloat16(), 1e-6)
    with pytest.raises(ValueError, match="the last dimension of weight must be contiguous"):
        gpu.rms_norm(torch.randn(2, 8), torch.randn(16)[::2], 1e-6)
    with pytest.raises(ValueError, match="residual must have shape"):
        gpu.rms_norm(torch.randn(2, 8), torch.randn(8), 1e-6, torch.randn(3, 8))
