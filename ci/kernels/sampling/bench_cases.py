"""K10: from logits to tokens, greedy, drawn, and drawn through filters. Tokens alone, as the peers give them.

Logits are normal, so that a row is flat: top-p alone keeps tens of thousands of tokens, the dearest row there is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ci.bench.kernels.case import Case, Goal, Inputs, Peer, Result, same_way
from inflight_kernels import philox_uniform
from inflight_kernels.sampling import gpu, reference
from inflight_kernels.sampling.gpu.sampling import CANDIDATES

TOP_K, TOP_P, MIN_P = 50, 0.9, 0.02
# Share of the kept mass by which float32 sums of 131072 weights may shift a border.
BORDER = 3e-5
# Arguments by row beside the logits: three float32, an int32 and two int64; a token is an int64.
ROW_BYTES = 3 * 4 + 4 + 2 * 8 + 8


def _inputs(
    batch: int, vocab_size: int, temperature: float, filters: tuple[int, float, float], device: torch.device, i: int
) -> Inputs:
    generator = torch.Generator(device).manual_seed(i)
    top_k, top_p, min_p = filters
    floats = [torch.full((batch,), value, device=device) for value in (temperature, top_p, min_p)]
    seeds, positions = (torch.randint(0, 2**40, (batch,), generator=generator, device=device) for _ in range(2))
    logits = torch.randn(batch, vocab_size, generator=generator, device=device)
    return logits, floats[0], torch.full_like(seeds, top_k, dtype=torch.int32), floats[1], floats[2], seeds, positions


def _sample(sampler: Callable[..., tuple[Tensor, Tensor]], flags: dict[str, bool], inputs: Inputs) -> Tensor:
    return sampler(*inputs, **flags, with_logprobs=False)[0]


def _check(inputs: Inputs, tokens: Result) -> None:
    """Each token's share of the kept mass, in float64, holds the row's uniform number."""
    assert isinstance(tokens, Tensor)
    logits, temperature, top_k, top_p, min_p, seeds, positions = inputs
    if float(temperature[0]) == 0.0:
        assert torch.equal(tokens, logits.argmax(1))
        return
    uniform = philox_uniform(seeds, positions).double()
    for row, token in enumerate(tokens.tolist()):
        weights = (logits[row].double() / temperature[row] - logits[row].max() / temperature[row]).exp()
        order = weights.argsort(descending=True, stable=True)
        falling = weights[order]
        if int(top_k[row]):
            falling[int(top_k[row]) :] = 0.0
        before = falling.cumsum(0) - falling
        falling *= before < float(top_p[row]) * falling.sum()
        shares = torch.zeros_like(weights).index_copy_(0, order, falling * (falling >= float(min_p[row])))
        shares /= shares.sum()
        reached = float(shares[: token + 1].sum())
        assert float(shares[token]) > 0.0, f"row {row} drew {token}, which its filters drop"
        assert reached - float(shares[token]) - BORDER <= float(uniform[row]) <= reached + BORDER, f"row {row}"


def _torch_sort(inputs: Inputs) -> Tensor:
    """All three filters over sorted probabilities, and a race of exponential variates: no host sync."""
    logits, temperature, top_k, top_p, min_p, *_ = inputs
    falling, indices = (logits / temperature[:, None]).sort(dim=1, descending=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    probabilities = falling.masked_fill(places >= top_k[:, None], float("-inf")).softmax(1)
    before = probabilities.cumsum(1) - probabilities
    drop = (before >= top_p[:, None]) | (probabilities < min_p[:, None] * probabilities[:, :1])
    probabilities.masked_fill_(drop, 0.0)
    place = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(1, keepdim=True)
    return indices.gather(1, place).squeeze(1)


def _torch_race(inputs: Inputs) -> Tensor:
    probabilities = (inputs[0] / inputs[1][:, None]).softmax(1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(1)


def _flashinfer(name: str, *places: int) -> Callable[[Inputs], Callable[[], Any]]:
    """One of FlashInfer's samplers from logits, given the inputs at `places`."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        return partial(_flashinfer_sampler(name), *(inputs[place] for place in places))

    return prepare


def _flashinfer_top_p(inputs: Inputs) -> Callable[[], Any]:
    sampler = _flashinfer_sampler("top_p_sampling_from_probs")
    return lambda: sampler(inputs[0].softmax(1), inputs[3])


def _flashinfer_sampler(name: str) -> Callable[..., Any]:
    """With a seed and an offset: without, it asks torch's generator for its state, which a capture forbids."""
    sampler = getattr(importlib.import_module("flashinfer.sampling"), name)
    takes = inspect.signature(sampler).parameters
    return partial(sampler, **{argument: 0 for argument in ("seed", "offset") if argument in takes})


def _vllm(with_top_k: bool) -> Callable[[Inputs], Callable[[], Any]]:
    """vLLM's Triton mask and its race. It masks in place: a copy, which from the second call on is masked before."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        mask = importlib.import_module("vllm.v1.sample.ops.topk_topp_triton").apply_top_k_top_p_triton
        copy = inputs[0].clone()

        def call() -> Tensor:
            probabilities = mask(copy, inputs[2] if with_top_k else None, inputs[3]).softmax(1)
            return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(1)

        return call

    return prepare


def _peer(prepare: Callable[[Inputs], Callable[[], Any]], needs: str = "", on_cpu: bool = False) -> Peer:
    # Another random stream: tokens differ.
    return Peer(prepare, needs=needs, on_cpu=on_cpu, comparable=False)


def cases(tiny: bool) -> list[Case]:
    batch, vocab_size = (2, 300) if tiny else (128, 131072)
    none = (0, 1.0, 0.0)
    flashinfer = {"FlashInfer": 1.5}

    def case(
        title: str,
        temperature: float,
        filters: tuple[int, float, float],
        goal: Goal,
        stretch: Goal | None,
        peers: dict[str, Peer],
    ) -> Case:
        flags = {
            "all_greedy": temperature == 0.0,
            "any_top_k": filters[0] > 0,
            "any_top_p": filters[1] < 1.0,
            "any_min_p": filters[2] > 0.0,
        }
        return Case(
            kernel="K10",
            title=f"sampling 128 x 128k fp32, {title}",
            goal=goal,
            stretch=stretch,
            make_inputs=partial(_inputs, batch, vocab_size, temperature, filters),
            run=partial(_sample, gpu.sample, flags),
            reference=partial(_sample, reference.sample, flags),
            tolerance=0.0,
            comparable=False,
            check=_check,
            bytes=batch * (4 * vocab_size + ROW_BYTES),
            formula="B (4 V + 40) bytes",
            peers=peers,
            candidates={"sample": CANDIDATES},
        )

    return [
        case(
            "greedy",
            0.0,
            none,
            Goal("25 us", microseconds=25.0),
            Goal("20 us", microseconds=20.0),
            {"torch": Peer(same_way(lambda *inputs: inputs[0].argmax(1)), on_cpu=True, comparable=False)},
        ),
        case(
            "no filter",
            0.8,
            none,
            Goal("35 us, 1.5x FlashInfer", microseconds=35.0, ratios=flashinfer),
            Goal("25 us", microseconds=25.0),
            {
                "torch": _peer(same_way(lambda *inputs: _torch_race(inputs)), on_cpu=True),
                "FlashInfer": _peer(_flashinfer("sampling_from_logits", 0), "flashinfer"),
            },
        ),
        case(
            "top-k 50, top-p 0.9, min-p 0.02",
            1.0,
            (TOP_K, TOP_P, MIN_P),
            Goal("120 us, 1.5x FlashInfer", microseconds=120.0, ratios=flashinfer),
            Goal("70 us", microseconds=70.0),
            {
                "torch sort": _peer(same_way(lambda *inputs: _torch_sort(inputs)), on_cpu=True),
                # Without min-p, which neither takes in the same call.
                "FlashInfer": _peer(_flashinfer("top_k_top_p_sampling_from_logits", 0, 2, 3), "flashinfer"),
                "vLLM": _peer(_vllm(True), "vllm.v1.sample.ops.topk_topp_triton"),
            },
        ),
        case(
            "top-p 0.9 of a flat row",
            1.0,
            (0, TOP_P, 0.0),
            Goal("no slower than FlashInfer", ratios={"FlashInfer": 1.0}),
            None,
            {
                "FlashInfer": _peer(_flashinfer_top_p, "flashinfer"),
                "vLLM": _peer(_vllm(False), "vllm.v1.sample.ops.topk_topp_triton"),
            },
        ),
    ]
