"""speculative_sample accepts drafts by their probability, and keeps the distribution of the tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import inflight_kernels

NONE = math.nan


def make_logits(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def choose(
    logits: Tensor,
    draft_logits: Tensor,
    drafts: Tensor,
    *,
    threshold: float = NONE,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seeds: Tensor | None = None,
    **options: Any,
) -> Tensor:
    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((len(drafts),), value, dtype=dtype)

    filters = (column(temperature), column(top_k, torch.int32), column(top_p), column(0.0))
    return inflight_kernels.speculative_sample(
        logits,
        *filters,
        torch.arange(len(drafts)) if seeds is None else seeds,
        torch.full((len(drafts),), 9),
        drafts,
        inflight_kernels.sampling_probabilities(draft_logits, *filters),
        column(threshold),
        logits.argmax(1),
        **options,
    )


def one_hot(drafts: Tensor, vocab_size: int) -> Tensor:
    return torch.full((len(drafts), vocab_size), -math.inf).scatter(1, drafts[:, None], 0.0)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 6}, {"temperature": 1.5, "top_p": 0.8}])
@pytest.mark.parametrize("seeds", ["of the drafts", "others"])
def test_tokens_have_the_distribution_of_sampling_without_drafts(options: dict[str, Any], seeds: str) -> None:
    """Chi-square over 20,000 rows, whose drafts are sampled from their own logits, even with the same seed."""
    rows, vocab_size = 20_000, 12
    p_logits, q_logits = (make_logits(1, vocab_size, seed).expand(rows, -1) for seed in (1, 2))
    size = torch.ones(rows)
    filters = (
        options.get("temperature", 1.0) * size,
        (options.get("top_k", 0) * size).int(),
        options.get("top_p", 1.0) * size,
        0 * size,
    )
    first = 0 if seeds == "of the drafts" else rows
    drafts, _ = inflight_kernels.sample(q_logits, *filters, torch.arange(first, first + rows), torch.full((rows,), 9))
    found = choose(p_logits, q_logits, drafts, **options)
    p = inflight_kernels.sampling_probabilities(p_logits[:1], *(each[:1] for each in filters))[0].double()
    observed = torch.bincount(found, minlength=vocab_size)
    assert not observed[p == 0].any()
    expected = rows * p[p > 0]
    assert ((observed[p > 0] - expected) ** 2 / expected).sum() < 31.3, "as in all but 0.1 % of fair draws among twelve"
    accepted = (found == drafts).double().mean()
    q = inflight_kernels.sampling_probabilities(q_logits[:1], *(each[:1] for each in filters))[0].double()
    assert float(accepted) == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.02)


def test_probabilities_are_those_that_sample_draws_from() -> None:
    logits = make_logits(1, 50, seed=4)
    column = torch.ones(1)
    p = inflight_kernels.sampling_probabilities(logits, 0.5 * column, (5 * column).int(), 0.9 * column, 0.05 * column)
    kept = (logits[0] / 0.5).softmax(0) * (p[0] > 0)
    torch.testing.assert_close(p[0], kept / kept.sum())
    greedy = inflight_kernels.sampling_probabilities(logits, 0 * column, (5 * column).int(), 0.1 * column, column)
    torch.testing.assert_close(greedy, logits.softmax(1))


def test_a_threshold_decides_by_the_ratio_of_the_probabilities() -> None:
    logits, draft_logits, drafts = make_logits(200, 40), make_logits(200, 40, seed=1), torch.arange(200) % 40
    p, q = (x.softmax(1).gather(1, drafts[:, None])[:, 0] for x in (logits, draft_logits))
    for threshold in (0.1, 0.5, 1.0):
        found = choose(logits, draft_logits, drafts, threshold=threshold)
        assert torch.equal(found == drafts, p >= threshold * q)
        # Where it is rejected, p(d) < q(d), so that the draft is not drawn either.


def test_a_threshold_without_logits_decides_by_the_probability_alone() -> None:
    logits, drafts = make_logits(200, 40), torch.arange(200) % 40
    p = logits.softmax(1).gather(1, drafts[:, None])[:, 0]
    found = choose(logits, one_hot(drafts, 40), drafts, threshold=0.05)
    assert torch.equal(found == drafts, p >= 0.05)


def test_greedy_rows_go_on_with_the_likeliest_token() -> None:
    logits, drafts = make_logits(200, 40), torch.arange(200) % 40
    p = logits.softmax(1).gather(1, drafts[:, None])[:, 0]
    found = choose(logits, one_hot(drafts, 40), drafts, threshold=0.05, temperature=0.0, top_k=3, top_p=0.1)
    assert torch.equal(found, torch.where(p >= 0.05, drafts, logits.argmax(1)))


def test_what_must_not_be_sampled_is_never_accepted() -> None:
    logits, drafts = make_logits(100, 10), torch.arange(100) % 10
    allowed = torch.ones(100, 10, dtype=torch.bool).scatter(1, drafts[:, None], False)
    for threshold in (NONE, 1e-30):
        found = choose(logits, make_logits(100, 10, seed=2), drafts, threshold=threshold, allowed_mask=allowed)
        assert not (found == drafts).any()
    equal = choose(logits, one_hot(drafts, 10), drafts, threshold=0.5, allowed_mask=~allowed)
    assert torch.equal(equal, drafts), "nothing else is allowed"


def test_drafts_of_the_same_distribution_are_all_accepted() -> None:
    logits = make_logits(300, 5000)
    column = torch.ones(300)
    drafts, _ = inflight_kernels.sample(
        logits, column, (0 * column).int(), column, 0 * column, torch.arange(300), torch.full((300,), 9)
    )
    assert torch.equal(choose(logits, logits, drafts), drafts)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, draft_logits, drafts = make_logits(30, 3000), make_logits(30, 3000, seed=1), torch.arange(30)
    together = choose(logits, draft_logits, drafts, top_p=0.9)
    for row in range(30):
        part = slice(row, row + 1)
        alone = choose(logits[part], draft_logits[part], drafts[part], top_p=0.9, seeds=torch.tensor([row]))
        assert torch.equal(alone, together[part])
