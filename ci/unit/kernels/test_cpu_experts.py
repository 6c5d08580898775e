"""Mixtures of experts in C++: what the reference computes, with the same bits in any batch, by all variants.

Run: pytest ci/unit/kernels/test_cpu_experts.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from compiled_network import IN_ORDER_OF_FMA, INSTRUCTIONS, force, needs_compiler
from torch import Tensor

import inflight_kernels
from inflight_kernels import Code, CodedWeight, join_halves
from inflight_kernels.activation.kinds import Activation
from inflight_kernels.cpu import (
    Batch,
    Choices,
    Instruction,
    Program,
    Unsupported,
    Variant,
    WeightPacker,
    load_library,
    record,
)
from inflight_kernels.cpu.variants import AVX2
from inflight_kernels.moe import ExpertWeights
from inflight_kernels.moe.routing import GroupScore, Routing, Scores

pytestmark = [pytest.mark.slow, needs_compiler]

SIZE = 64


@dataclass(frozen=True)
class Mixture:
    """A router and experts of random weights."""

    num_experts: int
    routing: Routing
    inner_size: int
    has_choice_bias: bool = False
    has_factors: bool = False
    has_biases: bool = False
    """Of the router and of the experts."""
    activation: Activation = Activation.SILU
    has_gates: bool = True

    def parts(self, dtype: torch.dtype) -> Parts:
        generator = torch.Generator().manual_seed(self.num_experts)

        def random(*sizes: int) -> Tensor:
            return (0.2 * torch.randn(sizes, generator=generator)).to(dtype)

        experts, inner = self.num_experts, self.inner_size
        router, gate_up, down = random(experts, SIZE), random(experts, 2 * inner, SIZE), random(experts, SIZE, inner)
        gate_up = gate_up if self.has_gates else gate_up[:, inner:].contiguous()
        parts = Parts(self, router, gate_up, down)
        if self.has_choice_bias:
            parts = parts._replace(choice_bias=random(experts).float())
        if self.has_factors:
            parts = parts._replace(factors=random(experts).float() + 1)
        if self.has_biases:
            biases = random(experts), random(experts, 2 * inner), random(experts, SIZE)
            parts = parts._replace(router_bias=biases[0], gate_up_bias=10 * biases[1], down_bias=biases[2])
        return parts

    def compiled(self, dtype: torch.dtype) -> Program:
        return compiled(self.parts(dtype).compute, dtype)

    def compiled_for_given(self, dtype: torch.dtype) -> Program:
        """The experts alone, which the batch chooses."""
        library, parts = load_library(dtype), self.parts(dtype)

        def network(x: Tensor, batch: Batch) -> Tensor:
            assert batch.choices is not None
            return parts.compute_chosen(x, batch.choices)

        recording = record(network, SIZE, dtype, num_chosen=self.routing.num_chosen)
        return Program(library, recording, WeightPacker(library, [recording]))


class Parts(NamedTuple):
    """Of a mixture, in one type."""

    mixture: Mixture
    router: Tensor
    gate_up: ExpertWeights
    down: ExpertWeights
    choice_bias: Tensor | None = None
    factors: Tensor | None = None
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    first_expert: int = 0

    def of_experts(self, first: int, end: int) -> Parts:
        """What a rank has that has these experts."""
        assert isinstance(self.gate_up, Tensor) and isinstance(self.down, Tensor)
        own = self._replace(gate_up=self.gate_up[first:end], down=self.down[first:end], first_expert=first)
        if self.gate_up_bias is None or self.down_bias is None:
            return own
        return own._replace(gate_up_bias=self.gate_up_bias[first:end], down_bias=self.down_bias[first:end])

    def choose(self, x: Tensor) -> Choices:
        logits = inflight_kernels.linear(x, self.router, self.router_bias)
        how = self.mixture.routing, self.choice_bias, self.factors, self.first_expert
        return Choices(*inflight_kernels.route_experts(logits, *how))

    def compute(self, x: Tensor) -> Tensor:
        return self.compute_chosen(x, self.choose(x))

    def compute_chosen(self, x: Tensor, choices: Choices) -> Tensor:
        return inflight_kernels.fused_moe(
            x,
            choices.weights_TK,
            choices.experts_TK,
            self.gate_up,
            self.down,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            activation=self.mixture.activation,
        )


def compiled(network: Callable[[Tensor], Tensor], dtype: torch.dtype, size: int = SIZE) -> Program:
    library = load_library(dtype)
    recording = record(lambda x, _: network(x), size, dtype)
    return Program(library, recording, WeightPacker(library, [recording]))


GROUPS = {"num_groups": 4, "num_chosen_groups": 2}
SIGMOID = {"scores": Scores.SIGMOID, "scale": 2.5}
MIXTURES = [
    Mixture(8, Routing(num_chosen=2), 96),
    Mixture(37, Routing(num_chosen=6, renormalize=False), 50),
    Mixture(3, Routing(num_chosen=3), 32),
    Mixture(128, Routing(num_chosen=8), 20),
    Mixture(40, Routing(num_chosen=3, renormalize=False, scale=2.5, **GROUPS), 32),
    Mixture(20, Routing(num_chosen=4), 32, has_choice_bias=True),
    Mixture(11, Routing(num_chosen=3), 36, has_factors=True, activation=Activation.GELU_TANH),
    Mixture(19, Routing(num_chosen=4, renormalize=False, **SIGMOID), 32),
    Mixture(12, Routing(num_chosen=3, epsilon=0.3, **SIGMOID), 32),
    Mixture(10, Routing(num_chosen=3, **SIGMOID), 50, activation=Activation.RELU_SQUARED, has_gates=False),
    Mixture(7, Routing(num_chosen=2), 50, has_biases=True),
    Mixture(6, Routing(num_chosen=2), 52, has_biases=True, activation=Activation.CLAMPED_SWIGLU),
    Mixture(9, Routing(num_chosen=2), 36, activation=Activation.GELU_TANH),
    Mixture(24, Routing(num_chosen=4, group_score=GroupScore.TOP2_SUM, **SIGMOID, **GROUPS), 32, has_choice_bias=True),
]
(WITHOUT_GATES,) = (mixture for mixture in MIXTURES if not mixture.has_gates)
COUNTS = (1, 2, 17, 33, 150)


def inputs(num_tokens: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_tokens, SIZE, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
def test_experts_are_those_of_the_reference(mixture: Mixture, dtype: torch.dtype, most: float) -> None:
    program, parts = mixture.compiled(dtype), mixture.parts(dtype)
    for num_tokens in COUNTS:
        x = inputs(num_tokens, dtype)
        expected = parts.compute(x).float()
        assert (program(x).float() - expected).norm() < most * expected.norm()


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_experts_compute_what_a_router_elsewhere_has_chosen(mixture: Mixture) -> None:
    program, parts = mixture.compiled_for_given(torch.float32), mixture.parts(torch.float32)
    num_experts = mixture.num_experts
    for num_tokens in COUNTS:
        x, generator = inputs(num_tokens, torch.float32), torch.Generator().manual_seed(num_tokens)
        shape = num_tokens, mixture.routing.num_chosen
        # What is no expert adds nothing, whatever its weight.
        chosen = torch.randint(-1, num_experts + 2, shape, generator=generator, dtype=torch.int32)
        weights = torch.randn(shape, generator=generator).masked_fill(chosen >= num_experts, float("nan"))
        choices = Choices(weights, chosen)
        expected = parts.compute_chosen(x, choices)
        found = program(x, Batch.of_choices(choices))
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        alone = program(x[-1:], Batch.of_choices(Choices(weights[-1:], chosen[-1:])))
        assert torch.equal(alone, found[-1:])


@pytest.mark.parametrize("mixture", [MIXTURES[3], MIXTURES[4], MIXTURES[6], MIXTURES[11], MIXTURES[-1]], ids=str)
def test_ranks_that_have_some_of_the_experts_compute_all_between_them(mixture: Mixture) -> None:
    """Of uneven numbers of them; a token none of whose experts a rank has is zeros there."""

    def of_ranks() -> list[Parts]:
        borders = [0, 1, mixture.num_experts // 2, mixture.num_experts]
        return [mixture.parts(torch.float32).of_experts(*own) for own in pairwise(borders)]

    parts, ranks = mixture.parts(torch.float32), of_ranks()
    # They take the weights away.
    programs = [compiled(rank.compute, torch.float32) for rank in of_ranks()]
    for num_tokens in COUNTS:
        x = inputs(num_tokens, torch.float32)
        expected, found = parts.compute(x), [program(x) for program in programs]
        assert (torch.stack(found).sum(0) - expected).norm() < 1e-5 * expected.norm()
        for rank, program, of_rank in zip(ranks, programs, found, strict=True):
            assert (of_rank - rank.compute(x)).norm() <= 1e-5 * expected.norm()
            assert torch.equal(program(x[-1:]), of_rank[-1:])


def test_more_experts_than_a_router_knows_are_unsupported() -> None:
    parts = MIXTURES[0].parts(torch.float32)._replace(first_expert=1)
    with pytest.raises(Unsupported, match="a router has logits of 8 experts, and 9 are chosen from"):
        record(lambda x, _: parts.compute(x), SIZE, torch.float32)


def test_a_batch_without_choices_is_refused() -> None:
    program, x = MIXTURES[0].compiled_for_given(torch.float32), inputs(3, torch.float32)
    choices = Choices(torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32))
    for batch in (None, Batch.of_choices(choices)):
        with pytest.raises(ValueError, match="does not say which 2 experts compute each token"):
            program(x, batch)


@pytest.mark.parametrize(
    ("dtype", "variant", "instruction"),
    [
        *IN_ORDER_OF_FMA,
        (torch.bfloat16, AVX2, Instruction.FMA_AS_AMX),
        *(pytest.param(torch.bfloat16, None, *each.values, marks=each.marks) for each in INSTRUCTIONS),
    ],
    ids=str,
)
def test_a_token_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, variant: Variant | None, instruction: Instruction, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, instruction, variant)
    program, x = MIXTURES[-3].compiled(dtype), inputs(max(COUNTS), dtype)
    expected = program(x)
    for num_tokens in COUNTS:
        assert torch.equal(program(x[:num_tokens]), expected[:num_tokens])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert torch.equal(program(x[order]), expected[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixture", [*MIXTURES[-3:], WITHOUT_GATES], ids=str)
def test_all_variants_give_the_same_bits(mixture: Mixture, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, x = [], inputs(50, dtype)
    for of_dtype, variant, instruction in IN_ORDER_OF_FMA:
        if of_dtype == dtype:
            force(monkeypatch, instruction, variant)
            answers.append(mixture.compiled(dtype)(x))
    assert all(torch.equal(answer, answers[0]) for answer in answers)


@pytest.mark.parametrize("mixture", [MIXTURES[0], MIXTURES[-3]], ids=str)
def test_what_is_no_number_stays_with_its_token(mixture: Mixture) -> None:
    program, x = mixture.compiled(torch.float32), inputs(40, torch.float32)
    expected, spoiled = program(x), x.clone()
    spoiled[11] = torch.nan
    found = program(spoiled)
    others = torch.arange(40) != 11
    assert torch.equal(found[others], expected[others])
    assert found[11].isnan().all()


def test_among_equals_the_lower_expert_is_chosen() -> None:
    parts, x = Mixture(5, Routing(num_chosen=2), 32).parts(torch.float32), inputs(3, torch.float32)
    parts = parts._replace(router=torch.zeros_like(parts.router))
    expected = parts.compute(x)
    torch.testing.assert_close(compiled(parts.compute, torch.float32)(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_ordered", [False, True], ids=["neighbours", "ordered"])
@pytest.mark.parametrize("code", Code, ids=lambda code: code.value)
@pytest.mark.parametrize(
    "mixture",
    [
        # Those of gpt-oss are FP4 in groups of 32.
        Mixture(6, Routing(num_chosen=2), 64, has_biases=True, activation=Activation.CLAMPED_SWIGLU),
        Mixture(6, Routing(num_chosen=2), 64, activation=Activation.RELU_SQUARED, has_gates=False),
    ],
    ids=str,
)
def test_codes_of_experts_have_biases_and_activations_too(mixture: Mixture, code: Code, is_ordered: bool) -> None:
    """And each an order of its inputs of its own."""
    generator = torch.Generator().manual_seed(3)

    def codes(*shape: int) -> CodedWeight:
        values = torch.randint(0, 2**code.bits, shape, generator=generator, dtype=torch.uint8)
        if code is Code.FP8:
            values[(values & 0x7F) == 0x7F] = 0  # is no number
        largest = code.numbers().nan_to_num().abs().max()
        scales = (torch.rand(*shape[:-1], shape[-1] // 32, generator=generator) / largest).bfloat16()
        orders = [torch.randperm(shape[-1], generator=generator).int() for _ in range(shape[0])]
        weight = CodedWeight(code, values if code.bits == 8 else join_halves(values), scales, None, 32)
        return weight._replace(permutation=torch.stack(orders)) if is_ordered else weight

    gate_up = codes(6, 128 if mixture.has_gates else 64, SIZE)
    parts = mixture.parts(torch.float32)._replace(gate_up=gate_up, down=codes(6, SIZE, 64))
    x = inputs(40, torch.float32)
    expected = parts.compute(x)
    program = compiled(parts.compute, torch.float32)
    found = program(x)
    # NF4's levels are rounded in C++ only where the activations have 16 bits.
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert torch.equal(program(x[:1]), found[:1])


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("gate_size", [1, SIZE])
def test_what_shared_experts_compute_is_gated_and_added(gate_size: int, dtype: torch.dtype, most: float) -> None:
    generator = torch.Generator().manual_seed(gate_size)
    gate = (0.3 * torch.randn(gate_size, SIZE, generator=generator)).to(dtype)

    def network(x: Tensor) -> Tensor:
        return x + inflight_kernels.sigmoid_mul(x, inflight_kernels.linear(x, gate))

    x = inputs(33, dtype)
    expected, program = network(x), compiled(network, dtype)
    found = program(x)
    torch.testing.assert_close(found, expected, rtol=most, atol=most)
    assert torch.equal(program(x[7:8]), found[7:8])


def test_a_gate_of_other_columns_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="a gate has 2 columns, and what it multiplies 64"):
        record(lambda x, _: inflight_kernels.sigmoid_mul(x, x[:, :2]), SIZE, torch.float32)
