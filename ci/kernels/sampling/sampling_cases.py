"""What the tests of sampling share: arguments of random rows, and a judge of drawn tokens in float64."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from inflight_kernels import philox_uniform
from inflight_kernels.sampling.reference import process_logits

# Weights summed before a sum is closed: the interpreter adds them one after the other.
LONGEST_SUM = 8192


def rows_of(batch: int, **values: float) -> dict[str, Tensor]:
    """The per-row arguments, every filter off and every row drawing, with fresh seeds; `values` replaces some."""
    floats = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    rows = {name: torch.full((batch,), values.get(name, default)) for name, default in floats.items()}
    rows["top_k"] = torch.full((batch,), int(values.get("top_k", 0)), dtype=torch.int32)
    rows["seeds"] = torch.randint(-(2**62), 2**62, (batch,))
    rows["positions"] = torch.randint(0, 2**40, (batch,))
    return rows


def on(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _kept_prefixes(x: Tensor, weights: Tensor, top_k: int, top_p: float, slack: float) -> list[Tensor]:
    """What top-k and top-p may keep of a row when sums of weights are `slack` off, as masks; all in float64.

    Every set between the smallest and the largest is one of the listed but for mass of at most twice the slack.
    """
    if 0 < top_k < len(x):
        weights = weights.masked_fill(x < x.topk(top_k).values[-1], 0.0)
    if top_p >= 1.0:
        return [weights > 0]
    order = x.sort(descending=True, stable=True).indices
    running = weights[order].cumsum(0)
    lengths = []
    for nudge in (1.0 - slack, 1.0 + slack):
        short = int((running < top_p * nudge * running[-1]).sum())
        lengths.append(min(short + 1, len(x)))
    fewest, most = lengths
    return [
        torch.zeros_like(x, dtype=torch.bool).index_fill_(0, order[:length], True) & (weights > 0)
        for length in sorted({fewest, max(most - 1, fewest), most})
    ]


def _may_draw(token: int, x: Tensor, uniform: float, temperature: float, filters: tuple[int, float, float]) -> bool:
    """Whether a row x (V,) may draw `token` in float32: its share of the kept mass holds `uniform` but for rounding.

    A sum of n weights is off by at most 6 sqrt(n) 2^-24 of itself, in any order, save once in 10^7 (Higham and Mary,
    2019, theorem 2.4); tiles bound n. A weight 2^e is off by 2^-22 of itself for the function, and by |e| 2^-22 for
    the four roundings of its exponent.
    """
    top_k, top_p, min_p = filters
    x = x.double()
    exponents = (x - x.max()) / (temperature * math.log(2.0))
    weights = exponents.exp2()
    error = weights * (
        4.0 + 6.0 * math.sqrt(min(len(x), LONGEST_SUM)) + 4.0 * exponents.nan_to_num(0.0, 0.0, 0.0).abs()
    )
    slack = 2.0**-24 * float(error.sum() / weights.sum())
    for kept in _kept_prefixes(x, weights, top_k, top_p, slack):
        for least in {min_p * (1.0 - slack), min_p, min_p * (1.0 + slack)}:
            shares = weights.masked_fill(~kept | (weights < min(least, 1.0)), 0.0)
            shares /= shares.sum()
            reached = float(shares[: token + 1].sum())
            before = reached - float(shares[token])
            if shares[token] > 0 and before - 3 * slack <= uniform <= reached + 3 * slack:
                return True
    return False


def assert_fair_choice(logits: Tensor, arguments: dict[str, Any], tokens: Tensor) -> None:
    """Every row's token is what its uniform number picks in exact arithmetic, or its neighbour over a rounding."""
    uniform = philox_uniform(arguments["seeds"], arguments["positions"])
    names = inspect.signature(process_logits).parameters
    x = process_logits(**{"logits": logits} | {name: arguments.get(name) for name in names if name != "logits"})
    for row, token in enumerate(tokens.tolist()):
        temperature = float(arguments["temperature"][row])
        if temperature == 0.0 or bool((x[row] == float("-inf")).all()):
            assert token == int(x[row].argmax()), f"row {row} is greedy"
            continue
        filters = (int(arguments["top_k"][row]), float(arguments["top_p"][row]), float(arguments["min_p"][row]))
        assert _may_draw(token, x[row], float(uniform[row]), temperature, filters), f"row {row} drew {token}"
