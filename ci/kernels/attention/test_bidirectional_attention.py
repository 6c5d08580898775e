"""Attention in both directions: kernel and reference against the softmax written out, on packed sequences."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ci.kernels.kernel_cases import ATTENTION_TOLERANCE, DTYPES, assert_near
from inflight_kernels.attention import gpu, reference

LENGTHS = [70, 1, 33, 2, 64]


def _inputs(
    lengths: list[int], num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v as views of one buffer, and where sequences start."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    qkv = torch.randn(sum(lengths), num_q_heads + 2 * num_kv_heads, head_dim).to(dtype)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v, starts


def _naive(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int, bias: Tensor | None) -> Tensor:
    """In float64."""
    group, rows = q.shape[1] // k.shape[1], []
    for begin, end in pairwise(starts.tolist()):
        queries, keys, values = (each[begin:end].double() for each in (q, k, v))
        scores = torch.einsum("ihd,jhd->hij", queries, keys.repeat_interleave(group, 1)) * scale
        for i in range(end - begin):
            for j in range(end - begin):
                if bias is not None:
                    scores[:, i, j] += bias[:, bias.shape[1] // 2 + j - i]
                if window and abs(i - j) > window:
                    scores[:, i, j] = -math.inf
        rows.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values.repeat_interleave(group, 1)))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "window", "has_bias"),
    [(2, 2, 32, 0, False), (3, 3, 64, 0, True), (4, 2, 80, 5, False), (2, 1, 128, 40, True), (1, 1, 32, 1, False)],
)
def test_kernel_and_reference_equal_the_softmax(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    q, k, v, starts = _inputs(LENGTHS, num_q_heads, num_kv_heads, head_dim, dtype)
    bias = torch.randn(num_q_heads, 2 * max(LENGTHS) + 3) if has_bias else None
    scale = head_dim**-0.5
    expected = _naive(q, k, v, starts, scale, window, bias)
    found = reference.bidirectional_attention(q, k, v, starts, max(LENGTHS), scale, window, bias)
    assert_near(found, expected, ATTENTION_TOLERANCE[dtype])
    moved = [None if each is None else each.to(device) for each in (q, k, v, starts, bias)]
    launched = gpu.bidirectional_attention(*moved[:4], max(LENGTHS), scale, window, moved[4])
    assert_near(launched, expected, ATTENTION_TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", [gpu, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("window", [0, 9])
def test_a_sequence_has_the_same_bits_alone(implementation: object, window: int, device: torch.device) -> None:
    if implementation is reference:
        device = torch.device("cpu")
    q, k, v, starts = (each.to(device) for each in _inputs(LENGTHS, 2, 2, 32, torch.float32))
    attend = implementation.bidirectional_attention  # type: ignore[attr-defined]
    together = attend(q, k, v, starts, 128, 0.2, window)
    for begin, end in pairwise(starts.tolist()):
        own = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        alone = attend(q[begin:end], k[begin:end], v[begin:end], own, end - begin, 0.2, window)
        torch.testing.assert_close(alone, together[begin:end], rtol=0, atol=0)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    q, k, v, starts = (each.to(device) for each in _inputs([3, 2], 2, 2, 32, torch.float32))
    with pytest.raises(ValueError, match="share keys evenly"):
        gpu.bidirectional_attention(q[:, :1], k, v, starts, 3, 0.2)
    with pytest.raises(ValueError, match="2 P - 1 columns"):
        gpu.bidirectional_attention(q, k, v, starts, 3, 0.2, 0, torch.zeros(2, 4, device=device))
    with pytest.raises(ValueError, match="starts"):
        gpu.bidirectional_attention(q, k, v, starts.long(), 3, 0.2)
