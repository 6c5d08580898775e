"""The product of each head: kernel and reference against an exact product, in any batch, of parts of wider heads."""

from __future__ import annotations

import pytest
import torch

from ci.kernels.kernel_cases import DTYPES, assert_near
from ci.kernels.matmul.linear_cases import LINEAR_TOLERANCE, poisoned_memory
from inflight_kernels.matmul import gpu, reference
from inflight_kernels.matmul.gpu.head_linear import CANDIDATES

SHAPES = [(1, 3, 40, 32), (5, 2, 70, 33), (70, 1, 16, 64)]
"""Tokens, heads, outputs, inputs."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_reference_equal_the_exact_product(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    num_tokens, num_heads, num_outputs, num_inputs = shape
    x = torch.randn(num_tokens, num_heads, num_inputs).to(dtype)
    weight = (torch.randn(num_heads, num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    exact = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    with poisoned_memory():
        assert_near(gpu.head_linear(x.to(device), weight.to(device)), exact, LINEAR_TOLERANCE[dtype])
    assert_near(reference.head_linear(x, weight), exact, LINEAR_TOLERANCE[dtype])


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_is_right(config: dict[str, int], device: torch.device) -> None:
    x, weight = torch.randn(18, 2, 96).half().to(device), (torch.randn(2, 130, 96) / 8).half().to(device)
    exact = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert_near(gpu.head_linear(x, weight, config=config), exact, LINEAR_TOLERANCE[torch.float16])


@pytest.mark.parametrize("name", ["kernel", "reference"])
def test_heads_may_be_parts_of_wider_ones(name: str, device: torch.device) -> None:
    where = device if name == "kernel" else torch.device("cpu")
    function = gpu.head_linear if name == "kernel" else reference.head_linear
    x, weight = torch.randn(6, 3, 50, device=where), torch.randn(3, 20, 32, device=where)
    out = torch.full((6, 3, 30), 7.0, device=where)
    returned = function(x[..., 10:42], weight, out[..., 4:24])
    assert returned.data_ptr() == out[..., 4:].data_ptr()
    exact = torch.einsum("thk,hnk->thn", x[..., 10:42].double(), weight.double())
    assert_near(out[..., 4:24], exact, 1e-4)
    assert bool((out[..., :4] == 7.0).all()) and bool((out[..., 24:] == 7.0).all())


@pytest.mark.parametrize("name", ["kernel", "reference"])
def test_a_row_is_bitwise_the_same_in_any_batch(name: str, device: torch.device) -> None:
    where = device if name == "kernel" else torch.device("cpu")
    function = gpu.head_linear if name == "kernel" else reference.head_linear
    x, weight = torch.randn(40, 2, 64, device=where), torch.randn(2, 40, 64, device=where)
    whole = function(x, weight, deterministic=True)
    for rows in (slice(0, 1), slice(39, 40), slice(3, 22)):
        assert torch.equal(function(x[rows], weight, deterministic=True), whole[rows])


def test_launcher_refuses_with_words(device: torch.device) -> None:
    x, weight = torch.randn(2, 3, 32, device=device), torch.randn(3, 16, 32, device=device)
    with pytest.raises(ValueError, match=r"got \(2, 3, 32\) and \(2, 16, 32\)"):
        gpu.head_linear(x, weight[:2])
    with pytest.raises(ValueError, match=r"out must have shape \(2, 3, 16\)"):
        gpu.head_linear(x, weight, x)
    with pytest.raises(ValueError, match="the last dimension of weight must be contiguous"):
        gpu.head_linear(x, weight.mT.contiguous().mT)
