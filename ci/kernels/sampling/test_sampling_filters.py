"""Every way to a row's threshold: listed groups, a narrowed bracket, passes over the row. The same rows go each way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ci.kernels.sampling.sampling_cases import assert_fair_choice, on, rows_of
from inflight_kernels.sampling import gpu
from inflight_kernels.sampling.gpu import sampling
from inflight_kernels.sampling.gpu._sampling_filters import SEARCHED, UNFILTERED

VOCAB_SIZE = 2000
# Eight tiles; lists of all groups, of 16 groups or 32 values a tile, and of one group or 2 values a tile.
WAYS = {
    "listed": {"BLOCK_V": 256, "GROUP": 16, "MAX_LISTED": 128, "num_warps": 4},
    "narrowed": {"BLOCK_V": 256, "GROUP": 16, "MAX_LISTED": 16, "num_warps": 4},
    "passes": {"BLOCK_V": 256, "GROUP": 16, "MAX_LISTED": 1, "num_warps": 4},
}
# Filters (top_k, top_p, min_p, temperature) and the kind of row on which they act.
ROWS: list[tuple[str, int, float, float, float]] = [
    ("normal", 40, 1.0, 0.0, 1.0),
    ("coarse", 300, 1.0, 0.0, 1.0),
    ("coarse", 700, 0.8, 0.02, 1.5),
    ("flat", 0, 0.5, 0.0, 1.0),
    ("normal", 0, 0.9, 0.0, 1.0),
    ("coarse", 0, 0.7, 0.001, 0.7),
    ("peaked", 0, 0.99, 0.0, 1.0),
    ("normal", 0, 1.0, 0.01, 1.0),
    ("flat", 0, 1.0, 0.5, 2.0),
    ("flat", 0, 0.999999, 0.0, 1.0),
    ("masked", 50, 0.9, 0.0, 1.0),
    ("normal", 0, 1.0, 0.0, 1.0),
    ("normal", 3, 0.5, 0.0, 0.0),
]
KINDS = {"normal": 3.0, "coarse": 3.0, "flat": 0.01, "peaked": 8.0, "masked": 3.0}


@contextmanager
def _poisoned_scratch() -> Iterator[None]:
    """Memory that torch hands out is full of NaN and largest integers."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _sample(
    logits: Tensor, rows: dict[str, Any], way: str, device: torch.device
) -> tuple[Tensor, Tensor, sampling._Found]:
    """Tokens, log-probabilities and what the kernels between statistics and draw left."""
    found: list[sampling._Found] = []
    find_kept = sampling._find_kept

    def watched(*arguments: Any) -> sampling._Found:
        found.append(find_kept(*arguments))
        return found[0]

    with _poisoned_scratch(), mock.patch.object(sampling, "_find_kept", watched):
        tokens, logprobs = gpu.sample(logits.to(device), **on(device, rows), config=WAYS[way])
    return tokens.cpu(), logprobs.cpu(), found[0]


def _mixed_batch() -> tuple[Tensor, dict[str, Any]]:
    logits = torch.stack([KINDS[kind] * torch.randn(VOCAB_SIZE) for kind, *_ in ROWS])
    for row, (kind, *_) in enumerate(ROWS):
        if kind == "coarse":
            logits[row] = (4 * logits[row]).round() / 4
        if kind == "masked":
            logits[row, torch.rand(VOCAB_SIZE) < 0.995] = float("-inf")
            logits[row, 1234] = 0.0
    rows = rows_of(len(ROWS))
    rows["top_k"] = torch.tensor([row[1] for row in ROWS], dtype=torch.int32)
    for place, name in ((2, "top_p"), (3, "min_p"), (4, "temperature")):
        rows[name] = torch.tensor([row[place] for row in ROWS])
    return logits, rows


@pytest.mark.parametrize("way", WAYS)
def test_every_way_draws_fairly_and_the_same_in_every_batch(way: str, device: torch.device) -> None:
    logits, rows = _mixed_batch()
    tokens, logprobs, found = _sample(logits, rows, way, device)
    assert_fair_choice(logits, rows, tokens)
    torch.testing.assert_close(logprobs, logits.log_softmax(1).gather(1, tokens[:, None])[:, 0], atol=2e-5, rtol=2e-5)

    num_listed = found.num_listed.tolist()
    assert num_listed[-2:] == [UNFILTERED.value] * 2
    searched = [row for row, count in enumerate(num_listed) if count == SEARCHED.value]
    assert (not searched) == (way == "listed")
    if searched:
        overflowed = (found.counts[searched] > found.values.shape[2]).any(1)
        assert bool(overflowed.any()) == (way == "passes")
    assert all(count <= WAYS[way]["MAX_LISTED"] for count in num_listed)

    order = torch.randperm(len(ROWS))[: len(ROWS) // 2]
    again = {name: value[order] for name, value in rows.items()}
    others, other_logprobs, _ = _sample(logits[order], again, way, device)
    assert torch.equal(others, tokens[order]) and torch.equal(other_logprobs, logprobs[order])


# numpy, under the interpreter, warns of what a row of nothing but NaN or -inf makes of its sums.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_stands_adversarial_rows(way: str, device: torch.device) -> None:
    nan, inf = float("nan"), float("inf")
    ramp = torch.arange(VOCAB_SIZE).float() / 500
    shelf = torch.where(torch.arange(VOCAB_SIZE) % 5 == 2, 1.0, 0.0)
    clustered = torch.where(torch.arange(VOCAB_SIZE) % 2 == 0, 10.0, 1e-6 * torch.rand(VOCAB_SIZE))
    # Logits, top_k, top_p, min_p, and the tokens that may be drawn: all if None.
    cases: list[tuple[Tensor, int, float, float, Any]] = [
        (torch.zeros(VOCAB_SIZE), 0, 0.25, 0.0, range(500)),
        (torch.zeros(VOCAB_SIZE), 7, 1.0, 0.0, None),
        (torch.full((VOCAB_SIZE,), -1e30).index_fill(0, torch.tensor(77), 1e30), 0, 0.9, 0.0, [77]),
        (torch.full((VOCAB_SIZE,), -inf).index_fill(0, torch.tensor([5, 1999]), -3.0), 0, 0.5, 0.0, [5]),
        (torch.full((VOCAB_SIZE,), -inf), 5, 0.5, 0.1, [0]),
        (shelf, 3, 1.0, 0.0, range(2, VOCAB_SIZE, 5)),
        (shelf, 0, 1e-9, 0.0, [2]),
        (shelf, 0, 1.0, 1.0, range(2, VOCAB_SIZE, 5)),
        (shelf, VOCAB_SIZE, 1.0, 0.0, None),
        (ramp, 1, 1.0, 0.0, [VOCAB_SIZE - 1]),
        (ramp, 0, 0.0, 0.0, [VOCAB_SIZE - 1]),
        (clustered, 1500, 1.0, 0.0, None),
        (-clustered, 0, 0.6, 0.0, None),
        (torch.where(torch.arange(VOCAB_SIZE) == 9, nan, ramp), 40, 0.9, 0.01, None),
        (torch.full((VOCAB_SIZE,), nan), 0, 0.9, 0.0, None),
    ]
    logits = torch.stack([case[0] for case in cases])
    rows = rows_of(len(cases))
    rows["top_k"] = torch.tensor([case[1] for case in cases], dtype=torch.int32)
    rows["top_p"], rows["min_p"] = torch.tensor([case[2] for case in cases]), torch.tensor([case[3] for case in cases])
    tokens, _, _ = _sample(logits, rows, way, device)
    assert int(tokens.min()) >= 0 and int(tokens.max()) < VOCAB_SIZE
    for row, case in enumerate(cases):
        assert case[4] is None or int(tokens[row]) in case[4], f"row {row} drew {int(tokens[row])}"
    sound = ~logits.isnan().any(1)
    assert_fair_choice(logits[sound], {name: value[sound] for name, value in rows.items()}, tokens[sound])


def test_a_bracket_full_of_equal_values_keeps_the_first_that_are_needed(device: torch.device) -> None:
    """Fifty equal values at the top, a hundred equal ones below; top-p ends inside the first or the second level.

    If either level were kept or dropped as a whole, every second or third draw would be wrong.
    """
    draws = 6
    top = torch.arange(0, VOCAB_SIZE, 40)
    second = torch.arange(7, VOCAB_SIZE, 20)
    logits = -20.0 - 10.0 * torch.rand(2 * draws, VOCAB_SIZE)
    logits[:, top] = 5.0
    logits[:, second] = 4.0
    weights = torch.tensor([5.0, 4.0]).double().exp()
    mass = 50 * weights[0] + 100 * weights[1]
    # Ten and a half of the first level, or all of it and five and a half of the second.
    shares = torch.stack([10.5 * weights[0], 50 * weights[0] + 5.5 * weights[1]]) / mass
    rows = rows_of(2 * draws)
    rows["top_p"] = shares.float().repeat_interleave(draws)
    tokens, _, found = _sample(logits, rows, "narrowed", device)
    assert found.num_listed.tolist() == [SEARCHED.value] * (2 * draws)
    assert set(tokens[:draws].tolist()) <= set(top[:11].tolist())
    assert set(tokens[draws:].tolist()) <= set(top.tolist()) | set(second[:6].tolist())
    assert_fair_choice(logits, rows, tokens)


# A draw through every kernel takes the interpreter a twentieth of a second; 80 suffice for a wrong filter to show.
@pytest.mark.parametrize("way", ["listed", "passes"] if torch.cuda.is_available() else ["listed"])
def test_every_way_draws_the_distribution_that_hugging_face_keeps(way: str, device: torch.device) -> None:
    draws = 100_000 if device.type == "cuda" else 80
    logits = 0.25 * torch.randperm(16).float()
    values = {"top_k": 9, "top_p": 0.9, "min_p": 0.1}
    scores = logits[None]
    for warper in (TopKLogitsWarper(9), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)):
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    expected = draws * scores[0].double().softmax(0)
    config = {"BLOCK_V": 16, "GROUP": 1, "MAX_LISTED": 16 if way == "listed" else 1, "num_warps": 1}
    tokens, _ = gpu.sample(logits.expand(draws, -1).to(device), **on(device, rows_of(draws, **values)), config=config)
    counts = torch.bincount(tokens.cpu(), minlength=16).double()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum() / 2
    # The chance of a statistic this high, by the chi-square distribution: a false alarm in a million runs.
    freedom = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
    assert float(torch.special.gammaincc(freedom, statistic)) > 1e-6
