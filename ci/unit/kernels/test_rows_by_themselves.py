"""What torch computes of a row of logits has the same bits whatever rows stand beside it, with a large vocabulary too.

Run: pytest ci/unit/kernels/test_rows_by_themselves.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import inflight_kernels

pytestmark = pytest.mark.usefixtures("two_threads")

VOCAB_SIZE = 151_936
"""Of Qwen: torch gives a single row of this many to several threads, and adds up their sums."""
ROWS = 5

LOGITS = 5 * torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
TEMPERATURE = torch.tensor([0.0, 0.7, 1.0, 1.3, 2.0])
TOP_K = torch.tensor([0, 40, 0, 1000, 0], dtype=torch.int32)
TOP_P = torch.tensor([1.0, 1.0, 0.9, 0.8, 0.999])
MIN_P = torch.tensor([0.0, 0.0, 0.0, 0.001, 0.0])
SEEDS, POSITIONS = torch.arange(ROWS), torch.full((ROWS,), 7)
FILTERS = (TEMPERATURE, TOP_K, TOP_P, MIN_P)


def sample(rows: slice) -> tuple[Tensor, ...]:
    arguments = (tensor[rows] for tensor in (LOGITS, *FILTERS, SEEDS, POSITIONS))
    return inflight_kernels.sample(*arguments, with_logprobs=True)


def log_sum_exp(rows: slice) -> tuple[Tensor, ...]:
    return (inflight_kernels.log_sum_exp(LOGITS[rows]),)


def probabilities(rows: slice) -> tuple[Tensor, ...]:
    return (inflight_kernels.sampling_probabilities(*(tensor[rows] for tensor in (LOGITS, *FILTERS))),)


def typical(rows: slice) -> tuple[Tensor, ...]:
    arguments = (tensor[rows] for tensor in (LOGITS, *FILTERS, torch.full((ROWS,), 0.6)))
    return (inflight_kernels.typical_mask(*arguments),)


@pytest.mark.parametrize("compute", [sample, log_sum_exp, probabilities, typical])
def test_a_row_alone_is_the_row_among_others(compute: Callable[[slice], tuple[Tensor, ...]]) -> None:
    together = compute(slice(None))
    for row in range(ROWS):
        for found, expected in zip(compute(slice(row, row + 1)), together, strict=True):
            assert torch.equal(found, expected[row : row + 1])


def test_log_sum_exp_is_that_of_torch() -> None:
    logits = torch.cat((LOGITS, torch.full((1, VOCAB_SIZE), float("-inf"))))
    torch.testing.assert_close(inflight_kernels.log_sum_exp(logits), logits.logsumexp(1))
