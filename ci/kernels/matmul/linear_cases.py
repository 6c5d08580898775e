"""What the tests of the linear layers share: memory that is poisoned when allocated, and products by another way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Outputs are about 1: the sum is in float32 and rounded once.
LINEAR_TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What torch.empty gives is NaN, or the largest integer, so that whatever is read unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def random_operands(num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (T, K) and weight (N, K) whose product is about 1 everywhere."""
    x = torch.randn(num_tokens, in_features).to(dtype)
    return x, (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias in float64."""
    y = torch.einsum("mk,nk->mn", x.double(), weight.double())
    return y if bias is None else y + bias.double()
