"""What numpy computes around a step on a CPU, against torch: the step's tokens, and greedy sampling.

Run: pytest ci/unit/kernels/test_on_host.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight_kernels.kv_cache import on_host
from inflight_kernels.kv_cache.reference import advance_in_torch
from inflight_kernels.sampling import reference

NUM_ROWS, WIDTH, BLOCK_SIZE, VOCAB_SIZE = 9, 5, 16, 1000
PADDING = NUM_ROWS - 1
STEPS: dict[str, dict[str, Tensor | int]] = {
    "decodes": {},
    "padding": {"padding_row": PADDING},
    "known tokens": {"token_ids": torch.tensor([-1, 5, -3, 0])},
    "drafts": {"offsets": torch.tensor([0, 0, 1, 2]), "token_ids": torch.tensor([-1, -1, 7, -2])},
    "longer rows": {"offsets": torch.tensor([0, 0, 0, 0, 1, 2]), "places": torch.tensor([0, 1, 2, 3, 3, 3])},
}


@pytest.mark.parametrize("named", STEPS)
def test_a_steps_tokens_are_those_of_torch(named: str) -> None:
    lengths, last_tokens = torch.randint(1, 60, (NUM_ROWS,)), torch.randint(0, 1000, (NUM_ROWS,))
    tables = torch.randint(0, 2**20, (NUM_ROWS, 2, WIDTH), dtype=torch.int32)
    rows = torch.tensor([3, 6, 6, 6] if named == "drafts" else [3, 6, PADDING, 1])
    counts = torch.tensor([1, 1, 2, 3] if named == "drafts" else [1, 1, 0, 3 if named == "longer rows" else 1])
    found = []
    for advance in (on_host.advance_rows, advance_in_torch):
        own = lengths.clone()
        tokens = advance(rows, counts, own, last_tokens, tables, BLOCK_SIZE, **STEPS[named])
        found.append([*tokens._replace(slots=torch.stack(tokens.slots)), own])
    for of_numpy, of_torch in zip(*found, strict=True):
        assert of_numpy.dtype == of_torch.dtype and torch.equal(of_numpy, of_torch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keeps_own", [False, True])
def test_greedy_rows_take_the_first_of_the_largest_logits(dtype: torch.dtype, keeps_own: bool) -> None:
    """A mask that forbids nothing leads the other way, by torch."""
    logits, nan, inf = torch.randn(6, VOCAB_SIZE).to(dtype), float("nan"), float("inf")
    logits[0, [7, 500, 999]] = 9.0
    logits[1, [3, 998]] = torch.tensor([inf, nan], dtype=dtype)
    logits[2] = -inf
    logits[3, 17] = inf
    logits[4, 10:] = -inf
    rows, zeros = torch.tensor([4, 9, 2, 0, 7, 5]), torch.zeros(10)
    found = []
    for mask in (None, torch.ones(6, VOCAB_SIZE, dtype=torch.bool)):
        results = {"is_finite": torch.zeros(6, dtype=torch.bool), "last_tokens": torch.full((10,), -1)}
        own = {"token_ids": torch.zeros(6, dtype=torch.int64)} if keeps_own else {}
        arguments = (logits, zeros, zeros.int(), zeros, zeros, zeros.long(), torch.arange(6))
        token_ids, _ = reference.sample(
            *arguments, allowed_mask=mask, all_greedy=True, with_logprobs=False, rows=rows, **own, **results
        )
        assert token_ids is own.get("token_ids", token_ids)
        found.append((token_ids, *results.values()))
    assert found[0][0].tolist()[:5] == [7, 998, 0, 17, int(logits[4, :10].argmax())]
    assert found[0][1].tolist() == [True, False, False, False, True, True]
    assert all(torch.equal(*each) for each in zip(*found, strict=True))
