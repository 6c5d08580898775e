"""Layers with a state for each sequence in C++: what torch computes, with the same bits by all variants, by any number
of threads, and however a sequence's tokens come.

Run: pytest ci/unit/kernels/test_cpu_recurrent.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from compiled_network import IN_ORDER_OF_FMA, force, needs_compiler
from sequence_steps import NUM_SLOTS, Run, assert_same_in_all_steps, sequences_of
from torch import Tensor

import inflight_kernels
from inflight_kernels import Activation, Gate, StepSequences
from inflight_kernels.cpu import Batch, Program, Unsupported, WeightPacker, load_library, record

pytestmark = [pytest.mark.slow, needs_compiler]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
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


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """The same bits, or both no number."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def assert_all_variants_compute(
    layer: Layer,
    weights: Sequence[Tensor],
    state: Tensor,
    input_size: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What torch computes, and all of them the same bits, by one thread and by two, in all steps."""
    x, *inputs = (random(count, input_size, dtype=dtype) for count in (44, 9, 4, 1))
    wanted_state = state.clone()
    wanted = layer(x, wanted_state, sequences_of(CHUNKS, KEPT), weights)
    found, in_all_steps = [], []
    for of_dtype, variant, instruction in IN_ORDER_OF_FMA:
        if of_dtype != dtype:
            continue
        force(monkeypatch, instruction, variant)

        def make(own: Tensor) -> Run:
            return run_of(compiled(layer, weights, own, input_size, dtype))

        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            own = state.clone()
            found.append((make(own)(x, sequences_of(CHUNKS, KEPT)), own))
        zeros = torch.zeros(NUM_SLOTS, *state.shape[1:], dtype=state.dtype)
        in_all_steps.append(assert_same_in_all_steps(make, inputs, zeros))
    torch.testing.assert_close(found[0][0], wanted, atol=MOST[dtype], rtol=MOST[dtype])
    torch.testing.assert_close(found[0][1], wanted_state, atol=2e-5, rtol=1e-4, equal_nan=True)
    for results in (found, in_all_steps):
        for by_one in results[1:]:
            for mine, theirs in zip(by_one, results[0], strict=True):
                assert_same(mine, theirs)


@pytest.mark.parametrize(
    ("num_channels", "num_taps", "activation", "weight_dtype"),
    [(300, 4, Activation.SILU, "as x"), (33, 2, None, torch.float32), (128, 1, Activation.RELU_SQUARED, "as x")],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@pytest.mark.parametrize(
    ("num_keys", "num_heads", "key_dim", "value_dim", "by_channel"),
    [(2, 4, 32, 48, False), (2, 2, 128, 64, False), (1, 2, 32, 48, True), (1, 1, 256, 16, True)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_delta_rule(
    dtype: torch.dtype,
    num_keys: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    by_channel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_decays = num_heads * (key_dim if by_channel else 1)
    widths = [2 * num_keys * key_dim + num_heads * value_dim, num_decays, num_heads]
    weights = [torch.linspace(-3.0, 2.0, num_heads), random(num_decays) - 2]

    def layer(x: Tensor, state: Tensor, sequences: StepSequences, weights: Sequence[Tensor]) -> Tensor:
        qkv, a, b = x.split(widths, 1)
        return inflight_kernels.gated_delta_rule(qkv, a, b, *weights, state, sequences, key_dim)

    state = random(7, num_heads, key_dim, value_dim) / key_dim**0.5
    state[[0, 1, 6]] = float("nan")
    assert_all_variants_compute(layer, weights, state, sum(widths), dtype, monkeypatch)


@pytest.mark.parametrize(
    ("num_groups", "num_heads", "head_dim", "state_dim", "limits"),
    [(2, 4, 32, 48, (0.0, float("inf"))), (1, 1, 16, 256, (0.2, 0.6))],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_space(
    dtype: torch.dtype,
    num_groups: int,
    num_heads: int,
    head_dim: int,
    state_dim: int,
    limits: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths = [num_heads * head_dim, num_groups * state_dim, num_groups * state_dim, num_heads]
    weights = [torch.linspace(-3.0, 2.0, num_heads), random(num_heads), random(num_heads) - 1]

    def layer(x: Tensor, state: Tensor, sequences: StepSequences, weights: Sequence[Tensor]) -> Tensor:
        columns = x.split(widths, 1)
        return inflight_kernels.state_space_scan(*columns, *weights, state, sequences, limits)

    state = random(7, num_heads, head_dim, state_dim)
    state[[0, 1, 6]] = float("nan")
    assert_all_variants_compute(layer, weights, state, sum(widths), dtype, monkeypatch)


@pytest.mark.parametrize("a", [-30.0, 0.0, 15.0, 300.0, float("nan")])
def test_a_state_decays_as_far_as_softplus_says(a: float) -> None:
    def layer(x: Tensor, state: Tensor, sequences: StepSequences, weights: Sequence[Tensor]) -> Tensor:
        qkv, of_decay, b = x.split([64, 1, 1], 1)
        return inflight_kernels.gated_delta_rule(qkv, of_decay, b, *weights, state, sequences, 16)

    weights, state = [torch.tensor([-3.0]), torch.zeros(1)], torch.ones(1, 1, 16, 32)
    x = torch.cat([random(1, 64), torch.tensor([[a, -1000.0]])], 1)
    run_of(compiled(layer, weights, state, 66, torch.float32))(x, sequences_of([(0, 1, 1)]))
    exact = torch.exp(-torch.exp(weights[0].double()) * torch.nn.functional.softplus(torch.tensor([a]).double()))
    expected = exact.float().expand(state.shape)
    torch.testing.assert_close(state, expected, atol=0, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("activation", Gate)
@pytest.mark.parametrize("weight_dtype", ["as x", torch.float32], ids=str)
@pytest.mark.parametrize(("group_size", "weight_size", "gate_first"), [(None, 48, False), (48, 96, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_with_a_gate(
    dtype: torch.dtype,
    group_size: int | None,
    weight_size: int,
    weight_dtype: torch.dtype | str,
    activation: Gate,
    gate_first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = random(weight_size, dtype=weight_dtype if isinstance(weight_dtype, torch.dtype) else dtype)

    def layer(x: Tensor, _: Tensor, __: StepSequences, weights: Sequence[Tensor]) -> Tensor:
        x, gate = x[:, :96], 3 * x[:, 96:]
        return inflight_kernels.gated_rms_norm(x, gate, weights[0], 1e-5, activation, group_size, gate_first)

    x, results = 2 * random(17, 192, dtype=dtype), []
    expected = layer(x, STATE, sequences_of([(0, 0, 17)]), [weight])
    for (of_dtype, variant, instruction), num_threads in itertools.product(IN_ORDER_OF_FMA, (1, 2)):
        if of_dtype == dtype:
            force(monkeypatch, instruction, variant)
            torch.set_num_threads(num_threads)
            run = run_of(compiled(layer, [weight], STATE, 192, dtype))
            results.append(run(x, sequences_of([(0, 0, 17)])))
            assert torch.equal(run(x[5:6], sequences_of([(0, 0, 1)])), results[0][5:6])
    assert results and all(torch.equal(each, results[0]) for each in results)
    if dtype == torch.float32:
        torch.testing.assert_close(results[0], expected, rtol=2e-5, atol=2e-6)
    else:
        # Where float32 adds up in another order, a tie may fall otherwise.
        assert (results[0] == expected).float().mean() > 0.98


WEIGHTS, STATE = [random(64, 4), random(64, 9), random(63, 4)], torch.zeros(2, 3, 64)
DECAYS, DELTA_STATE = [torch.zeros(2), torch.zeros(2)], torch.zeros(2, 2, 32, 48)


def convolve(x: Tensor, weight: Tensor, state: Tensor, sequences: StepSequences) -> Tensor:
    return inflight_kernels.causal_conv(x, weight, None, state, sequences)


def scan(x: Tensor, sequences: StepSequences, weights: Sequence[Tensor], state: Tensor) -> Tensor:
    """A state space of two heads of sixteen rows."""
    columns = x[:, :32], x[:, 32:48], x[:, 48:], x[:, :2]
    return inflight_kernels.state_space_scan(*columns, *weights, state, sequences)


def attend(
    x: Tensor, sequences: StepSequences, weights: Sequence[Tensor], key_dim: int = 32, state: Tensor = DELTA_STATE
) -> Tensor:
    """Linear attention of two heads."""
    qkv, a, b = x, x[:, :2], x[:, 2:4]
    return inflight_kernels.gated_delta_rule(qkv, a, b, *weights, state, sequences, key_dim)


REFUSED: dict[str, tuple[Layer, Sequence[Tensor], str]] = {
    "other sequences": (
        lambda x, state, _, weights: convolve(x, weights[0], state, sequences_of([(0, 0, 13)])),
        WEIGHTS,
        "the step's own sequences only",
    ),
    "many taps": (
        lambda x, state, sequences, weights: convolve(x, weights[1], state, sequences),
        WEIGHTS,
        "over 9 tokens, and C\\+\\+ has those up to 8",
    ),
    "chunks": (
        lambda x, _, sequences, weights: inflight_kernels.gated_delta_rule(
            x, x[:, :2], x[:, 2:4], *weights, DELTA_STATE, sequences, 32, DELTA_STATE
        ),
        DECAYS,
        "token by token, and keeps no inputs of chunks",
    ),
    "some columns": (
        lambda x, state, sequences, weights: convolve(x, weights[2], state, sequences),
        WEIGHTS,
        "not over all columns of its input",
    ),
    "another state": (
        lambda x, state, sequences, weights: convolve(x, weights[0], state[:, 1:], sequences),
        WEIGHTS,
        r"the state of a short convolution is not a constant of shape \(2, 3, 64\)",
    ),
    "linear attention of other sequences": (
        lambda x, _, __, weights: attend(x, sequences_of([(0, 0, 13)]), weights),
        DECAYS,
        "the step's own sequences only",
    ),
    "odd heads": (
        lambda x, _, sequences, weights: attend(x, sequences, weights, 24),
        DECAYS,
        "heads of 24 and 48 elements, which are not multiples of 16",
    ),
    "columns": (
        lambda x, _, sequences, weights: attend(x, sequences, weights, 16),
        DECAYS,
        "columns that are not those of its heads",
    ),
    "a state space of other sequences": (
        lambda x, _, __, weights: scan(x, sequences_of([(0, 0, 13)]), weights, torch.zeros(2, 2, 16, 16)),
        [torch.zeros(2)] * 3,
        "the step's own sequences only",
    ),
    "odd rows": (
        lambda x, _, sequences, weights: scan(x, sequences, weights, torch.zeros(2, 2, 8, 16)),
        [torch.zeros(2)] * 3,
        "heads of 8 rows of 16 columns, which are not multiples of 16",
    ),
    "heads": (
        lambda x, _, sequences, weights: scan(x, sequences, weights, torch.zeros(2, 3, 16, 16)),
        [torch.zeros(2)] * 3,
        "a state space has columns that are not those of its heads",
    ),
    "no bias of heads": (
        lambda x, _, sequences, weights: scan(x, sequences, weights, torch.zeros(2, 2, 16, 16)),
        [torch.zeros(2), torch.zeros(2), torch.zeros(3)],
        r"dt_bias of a state space is not a constant of shape \(2,\)",
    ),
    "groups": (
        lambda x, _, __, weights: inflight_kernels.gated_rms_norm(x, x, weights[0], 1e-6),
        [torch.ones(24)],
        "64 columns in groups of 24, which is not a multiple of 16",
    ),
    "another gate": (
        lambda x, _, __, weights: inflight_kernels.gated_rms_norm(x, x[:, :32], weights[0], 1e-6),
        [torch.ones(32)],
        "a norm has a gate of other columns",
    ),
    "a wide state": (
        lambda x, _, sequences, weights: attend(x, sequences, weights, 16, torch.zeros(2, 2, 16, 16).half()),
        DECAYS,
        "the state of linear attention is torch.float16 and not torch.float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_has_otherwise_is_the_reason(name: str) -> None:
    layer, weights, reason = REFUSED[name]
    with pytest.raises(Unsupported, match=reason):
        compiled(layer, weights, STATE, 64, torch.float32)


def test_a_batch_must_say_whose_its_tokens_are() -> None:
    program = compiled(
        lambda x, state, sequences, weights: convolve(x, weights[0], state, sequences),
        WEIGHTS,
        STATE,
        64,
        torch.float32,
    )
    with pytest.raises(ValueError, match="the batch has no sequences"):
        program(random(3, 64))
