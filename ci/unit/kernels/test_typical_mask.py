"""typical_mask keeps the tokens that transformers' logits warpers keep, and each row by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import inflight_kernels

CASES: list[dict[str, float]] = [
    {"typical_p": 0.9},
    {"typical_p": 0.2, "temperature": 1.7},
    {"typical_p": 0.95, "temperature": 0.6, "top_k": 40},
    {"typical_p": 0.5, "top_p": 0.8},
    {"typical_p": 0.6, "min_p": 0.02},
    {"typical_p": 0.7, "temperature": 1.3, "top_k": 100, "top_p": 0.9, "min_p": 0.01},
    {"typical_p": 1e-6},
    {"typical_p": 0.999},
]


def make_logits(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def mask_of(logits: Tensor, cases: list[dict[str, float]], **options: Any) -> Tensor:
    def column(name: str, default: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([case.get(name, default) for case in cases], dtype=dtype)

    return inflight_kernels.typical_mask(
        logits,
        column("temperature", 1.0),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0),
        column("min_p", 0.0),
        column("typical_p", 1.0),
        **options,
    )


def expected(logits_V: Tensor, case: dict[str, float]) -> Tensor:
    scores = TemperatureLogitsWarper(case.get("temperature", 1.0))(None, logits_V[None])
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in case:
            scores = warper(case[name])(None, scores)
    return TypicalLogitsWarper(case["typical_p"])(None, scores)[0] > float("-inf")


@pytest.mark.parametrize("vocab_size", [7, 300, 5000])
def test_it_keeps_what_transformers_keeps(vocab_size: int) -> None:
    cases = [case for case in CASES if case.get("top_k", 0) <= vocab_size]
    logits = make_logits(len(cases), vocab_size)
    found = mask_of(logits, cases)
    for row, case in enumerate(cases):
        assert torch.equal(found[row], expected(logits[row], case)), case
    assert found.any(1).all()
    assert len({int(kept) for kept in found.sum(1)}) > 2


def test_the_likeliest_token_may_be_dropped() -> None:
    """That is the point of it: where one token in a hundred is certain to come, a likely one tells too little."""
    probs = torch.tensor([[0.3, *([0.7 / 70] * 70)]])
    kept = mask_of(probs.log(), [{"typical_p": 0.5}])[0]
    assert not kept[0] and kept[1:].all()


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = make_logits(len(CASES), 5000, seed=3)
    together = mask_of(logits, CASES)
    for row, case in enumerate(CASES):
        assert torch.equal(mask_of(logits[[row]], [case])[0], together[row])


def test_penalties_biases_and_masks_come_first() -> None:
    logits = make_logits(1, 300, seed=5)
    bias = torch.zeros(1, 300)
    bias[0, 11] = 30.0
    allowed = torch.ones(1, 300, dtype=torch.bool)
    allowed[0, :200] = False
    allowed[0, 11] = True
    counts = torch.zeros(1, 300, dtype=torch.int32)
    counts[0, 250] = 4
    changed = (logits + bias).masked_fill(~allowed, float("-inf"))
    changed[0, 250] -= 4 * 0.5
    found = mask_of(
        logits,
        [{"typical_p": 0.8}],
        logit_bias=bias,
        allowed_mask=allowed,
        output_counts=counts,
        frequency_penalty=torch.tensor([0.5]),
    )
    assert torch.equal(found[0], expected(changed[0], {"typical_p": 0.8}))
    assert not found[~allowed].any()


def test_a_row_without_a_possible_token_keeps_none() -> None:
    allowed = torch.zeros(2, 300, dtype=torch.bool)
    allowed[1, 5] = True
    found = mask_of(make_logits(2, 300), [{"typical_p": 0.5}] * 2, allowed_mask=allowed)
    assert not found[0].any()
    assert found[1].nonzero().flatten().tolist() == [5]
