"""Mixtures of experts in C++: what the reference computes, with the same bits in any batch, by all variants.

Run: pytest ci/unit/kernels/test_cpu_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from compiled_network import IN_ORDER_OF_FMA, INSTRUCTIONS, force, needs_compiler
from torch import Tensor

import inflight_kernels
from inflight_kernels.cpu import Instruction, Program, Variant, WeightPacker, load_library, record
from inflight_kernels.cpu.variants import AVX2

pytestmark = [pytest.mark.slow, needs_compiler]

SIZE = 64


@dataclass(frozen=True)
class Mixture:
    """A router and experts of random weights."""

    num_experts: int
    num_chosen: int
    inner_size: int
    renormalize: bool

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.num_experts)

        def random(*sizes: int) -> Tensor:
            return (0.2 * torch.randn(sizes, generator=generator)).to(dtype)

        experts, inner = self.num_experts, self.inner_size
        return random(experts, SIZE), random(experts, 2 * inner, SIZE), random(experts, SIZE, inner)

    def compute(self, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        logits = inflight_kernels.linear(x, router)
        chosen = inflight_kernels.route_experts(logits, self.num_chosen, self.renormalize)
        return inflight_kernels.fused_moe(x, *chosen, gate_up, down)

    def compiled(self, dtype: torch.dtype) -> Program:
        library, weights = load_library(dtype), self.weights(dtype)
        recording = record(lambda x, _: self.compute(x, *weights), SIZE, dtype)
        return Program(library, recording, WeightPacker(library, [recording]))


MIXTURES = [Mixture(8, 2, 96, True), Mixture(37, 6, 50, False), Mixture(3, 3, 32, True), Mixture(128, 8, 20, True)]
COUNTS = (1, 2, 17, 33, 150)


def inputs(num_tokens: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_tokens, SIZE, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
def test_experts_are_those_of_the_reference(mixture: Mixture, dtype: torch.dtype, most: float) -> None:
    compiled, weights = mixture.compiled(dtype), mixture.weights(dtype)
    for num_tokens in COUNTS:
        x = inputs(num_tokens, dtype)
        expected = mixture.compute(x, *weights).float()
        assert (compiled(x).float() - expected).norm() < most * expected.norm()


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
    compiled, x = MIXTURES[0].compiled(dtype), inputs(max(COUNTS), dtype)
    expected = compiled(x)
    for num_tokens in COUNTS:
        assert torch.equal(compiled(x[:num_tokens]), expected[:num_tokens])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert torch.equal(compiled(x[order]), expected[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_all_variants_give_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, x = [], inputs(50, dtype)
    for of_dtype, variant, instruction in IN_ORDER_OF_FMA:
        if of_dtype == dtype:
            force(monkeypatch, instruction, variant)
            answers.append(MIXTURES[1].compiled(dtype)(x))
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_what_is_no_number_stays_with_its_token() -> None:
    compiled, x = MIXTURES[0].compiled(torch.float32), inputs(40, torch.float32)
    expected, spoiled = compiled(x), x.clone()
    spoiled[11] = torch.nan
    found = compiled(spoiled)
    others = torch.arange(40) != 11
    assert torch.equal(found[others], expected[others])
    assert found[11].isnan().all()


def test_among_equals_the_lower_expert_is_chosen() -> None:
    mixture, x = Mixture(5, 2, 32, True), inputs(3, torch.float32)
    router, gate_up, down = mixture.weights(torch.float32)
    router = torch.zeros_like(router)
    expected = mixture.compute(x, router, gate_up, down)
    library = load_library(torch.float32)
    recording = record(lambda x, _: mixture.compute(x, router, gate_up, down), SIZE, torch.float32)
    found = Program(library, recording, WeightPacker(library, [recording]))(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
