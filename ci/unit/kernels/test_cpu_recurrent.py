"""Layers with a state for each sequence in C++: what torch computes, with the same bits by all variants, by any number
of threads, and however a sequence's tokens come.

Run: pytest ci/unit/kernels/test_cpu_recurrent.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from compiled_network import IN_ORDER_OF_FMA, force, needs_compiler
from sequence_steps import NUM_SLOTS, Run, assert_same_in_all_steps, sequences_of
from torch import Tensor

import inflight_kernels
from inflight_kernels import Activation, StepSequences
from inflight_kernels.cpu import Batch, Program, Unsupported, WeightPacker, load_library, record

pytestmark = [pytest.mark.slow, needs_compiler]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""How far what C++ rounds may be from what torch rounds."""
CHUNKS = [(3, 5, 1), (0, 0, 1), (5, 1, 40), (1, 0, 2)]
"""Decodes, one of them of a new sequence, and chunks."""
KEPT = {(5, 1): 4, (5, 40): 2}
Layer = Callable[[Tensor, Tensor, StepSequences, Sequence[Tensor]], Tensor]
"""Of inputs (T, columns), a state, whose tokens they are, and weights."""


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def compiled(layer: Layer, weights: Sequence[Tensor], state: Tensor, input_size: int, dtype: torch.dtype) -> Program:
    own = [weight.clone() for weight in weights]  # it frees what it packs

    def network(x: Tensor, batch: Batch) -> Tensor:
        assert batch.sequences is not None
        return layer(x, state, batch.sequences, own)

    library, recording = load_library(dtype), record(network, input_size, dtype)
    return Program(library, recording, WeightPacker(library, [recording]))


def run_of(program: Program) -> Run:
    def run(x: Tensor, sequences: StepSequences) -> Tensor:
        batch = replace(Batch.meta(0, 0), positions_T=sequences.positions_T, sequences=sequences)
        of_no_rows = {
            name: torch.zeros(getattr(batch, name).shape, dtype=getattr(batch, name).dtype)
            for name in Batch.__slots__
            if isinstance(getattr(batch, name), Tensor) and getattr(batch, name).is_meta
        }
        return program(x, replace(batch, **of_no_rows)).clone()

    return run


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_all_variants_compute(
    layer: Layer,
    weights: Sequence[Tensor],
    state: Tensor,
    input_size: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What torch computes, in all steps, each with the same bits."""
    x, by_first, state_by_first = random(44, input_size, dtype=dtype), None, None
    wanted_state = state.clone()
    wanted = layer(x, wanted_state, sequences_of(CHUNKS, KEPT), weights)
    inputs = [random(count, input_size, dtype=dtype) for count in (9, 4, 1)]
    in_all_steps = None
    for of_dtype, variant, instruction in IN_ORDER_OF_FMA:
        if of_dtype != dtype:
            continue
        force(monkeypatch, instruction, variant)
        own = state.clone()
        found = run_of(compiled(layer, weights, own, input_size, dtype))(x, sequences_of(CHUNKS, KEPT))
        if by_first is None:
            torch.testing.assert_close(found, wanted, atol=MOST[dtype], rtol=MOST[dtype])
            torch.testing.assert_close(own, wanted_state, atol=1e-5, rtol=1e-4, equal_nan=True)
        by_first, state_by_first = (found, own) if by_first is None else (by_first, state_by_first)
        assert state_by_first is not None
        assert torch.equal(found, by_first), variant
        assert torch.equal(own.nan_to_num(7.0), state_by_first.nan_to_num(7.0)), variant

        def make(own: Tensor) -> Run:
            return run_of(compiled(layer, weights, own, input_size, dtype))

        of_variant = assert_same_in_all_steps(make, inputs, torch.zeros(NUM_SLOTS, *state.shape[1:], dtype=state.dtype))
        in_all_steps = in_all_steps or of_variant
        assert all(map(torch.equal, of_variant, in_all_steps)), variant


@pytest.mark.parametrize(
    ("num_channels", "num_taps", "activation"),
    [(300, 4, Activation.SILU), (33, 2, None), (128, 1, Activation.RELU_SQUARED)],
)
@pytest.mark.parametrize("weight_dtype", ["as x", torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("num_threads")
def test_a_short_convolution(
    dtype: torch.dtype,
    weight_dtype: torch.dtype | str,
    num_channels: int,
    num_taps: int,
    activation: Activation | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_weight = weight_dtype if isinstance(weight_dtype, torch.dtype) else dtype
    weights = [random(num_channels, num_taps, dtype=of_weight)]
    if activation is not None:
        weights.append(random(num_channels, dtype=of_weight))

    def layer(x: Tensor, state: Tensor, sequences: StepSequences, weights: Sequence[Tensor]) -> Tensor:
        weight, bias = weights if len(weights) == 2 else (weights[0], None)
        return inflight_kernels.causal_conv(x[:, 3:], weight, bias, state, sequences, activation)

    state = random(7, num_taps - 1, num_channels, dtype=dtype)
    state[[0, 1, 6]] = float("nan")
    assert_all_variants_compute(layer, weights, state, num_channels + 3, dtype, monkeypatch)


WEIGHTS, STATE = [random(64, 4), random(64, 9), random(63, 4)], torch.zeros(2, 3, 64)
REFUSED: dict[str, tuple[Layer, str]] = {
    "other sequences": (
        lambda x, state, _, weights: inflight_kernels.causal_conv(
            x, weights[0], None, state, sequences_of([(0, 0, 13)])
        ),
        "the step's own sequences only",
    ),
    "many taps": (
        lambda x, state, sequences, weights: inflight_kernels.causal_conv(x, weights[1], None, state, sequences),
        "over 9 tokens, and C\\+\\+ has those up to 8",
    ),
    "some columns": (
        lambda x, state, sequences, weights: inflight_kernels.causal_conv(x, weights[2], None, state, sequences),
        "not over all columns of its input",
    ),
    "another state": (
        lambda x, state, sequences, weights: inflight_kernels.causal_conv(x, weights[0], None, state[:, 1:], sequences),
        r"the state of a short convolution is not a constant of shape \(2, 3, 64\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_has_otherwise_is_the_reason(name: str) -> None:
    layer, reason = REFUSED[name]
    with pytest.raises(Unsupported, match=reason):
        compiled(layer, WEIGHTS, STATE, 64, torch.float32)


def test_a_batch_must_say_whose_its_tokens_are() -> None:
    program = compiled(
        lambda x, state, sequences, weights: inflight_kernels.causal_conv(x, weights[0], None, state, sequences),
        WEIGHTS,
        STATE,
        64,
        torch.float32,
    )
    with pytest.raises(ValueError, match="the batch has no sequences"):
        program(random(3, 64))
