"""Chunks: tokens between fixed positions of a sequence, which kernels compute at once."""

from __future__ import annotations

from torch import Tensor

CHUNK = 16
"""A chunk begins at each multiple of it. A matrix instruction multiplies 16 rows or more: a step that brings one token
of a chunk, and computes all that there are of it, takes no more of them than for a single row."""

ALIGNED_INPUTS = 8
"""Numbers of two bytes that are loaded at once."""


def chunk_shape(tensor: Tensor, num_heads: int, num_inputs: int) -> tuple[int, int, int]:
    """See `inflight_kernels.chunk_shape`: with padding of each token."""
    return num_heads, CHUNK - 1, -(-num_inputs // ALIGNED_INPUTS) * ALIGNED_INPUTS
