"""Tensors without memory for ahead-of-time cases, and how a configuration shows in a case's name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def bf16(*shape: int) -> Tensor:
    """A bfloat16 meta tensor."""
    return of(torch.bfloat16, *shape)


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    """A meta tensor of any dtype."""
    return torch.empty(shape, dtype=dtype, device="meta")


def show(config: Mapping[str, int]) -> str:
    """A configuration in few letters: "BLOCK_N=64 num_warps=4"."""
    return " ".join(f"{name}={value}" for name, value in config.items())
