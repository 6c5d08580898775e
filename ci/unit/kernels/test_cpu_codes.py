"""Weights of 4 and 8 bits in C++: the product of what their codes mean, with the same bits in any batch, by all
variants and instructions.

Run: pytest ci/unit/kernels/test_cpu_codes.py
"""

from __future__ import annotations

import pytest
import torch
from compiled_network import HAS_AMX, IN_ORDER_OF_FMA, force, needs_compiler
from torch import Tensor

import inflight_kernels
from inflight_kernels import Code, CodedWeight, join_halves
from inflight_kernels.cpu import Instruction, Program, WeightPacker, load_library, record, variants_here
from inflight_kernels.cpu.matrix import MAX_GROUP_SIZE
from inflight_kernels.cpu.variants import AMX

pytestmark = [pytest.mark.slow, needs_compiler]

COUNTS = (*range(1, 8), 16, 17, 33, 70)
"""Of rows: of one pass over codes, and of those for which they are decoded."""
PRECISION = {torch.float32: 2**-18, torch.float16: 2**-10, torch.bfloat16: 2**-8}
"""Of a rounded sum of products."""
GROUPS = [
    pytest.param(1088, 32, torch.float16, None, id="small groups"),
    pytest.param(1024, 128, torch.float32, torch.int8, id="zeros"),
    pytest.param(320, 32, torch.float32, torch.float32, id="zeros between numbers"),
    pytest.param(1000, 1024, torch.bfloat16, None, id="one group, no whole step"),
    pytest.param(3 * MAX_GROUP_SIZE, 2 * MAX_GROUP_SIZE, torch.float32, None, id="large groups"),
    pytest.param(320, 128, torch.float16, None, id="a short last group"),
]


def random_codes(
    code: Code,
    *shape: int,
    group_size: int = 64,
    scale_dtype: torch.dtype = torch.float16,
    zeros: torch.dtype | None = None,
) -> CodedWeight:
    """Of all numbers that the code has, with the scales of a layer."""
    generator = torch.Generator().manual_seed(sum(shape))
    codes = torch.randint(0, 2**code.bits, shape, generator=generator, dtype=torch.uint8)
    if code is Code.FP8:
        codes[(codes & 0x7F) == 0x7F] = 0  # is no number
    groups = (*shape[:-1], -(-shape[-1] // group_size))
    scales = (torch.rand(groups, generator=generator) * 0.01 + 0.001).to(scale_dtype)
    of_group = (16 * torch.rand(groups, generator=generator) - 8).to(zeros) if zeros else None
    return CodedWeight(code, codes if code.bits == 8 else join_halves(codes), scales, of_group, group_size)


def inputs(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(5)).to(dtype)


def padded(x: Tensor) -> Tensor:
    """To a multiple of 32, as what comes before a product pads it."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 32))


def copy_of(weight: CodedWeight) -> CodedWeight:
    """Which packing frees."""
    return weight._replace(
        codes=weight.codes.clone(),
        scales=weight.scales.clone(),
        zeros=None if weight.zeros is None else weight.zeros.clone(),
    )


def compiled(weight: CodedWeight, dtype: torch.dtype, bias: Tensor | None = None) -> Program:
    library = load_library(dtype)
    num_inputs = -(-weight.shape[1] // 32) * 32
    if num_inputs != weight.shape[1]:
        codes = weight.codes_by_column()
        more = torch.full((len(codes), num_inputs - codes.shape[1]), weight.code.of_zero, dtype=torch.uint8)
        codes = torch.cat([codes, more], 1)
        weight = weight._replace(codes=codes if weight.code.bits == 8 else join_halves(codes))
    own = copy_of(weight), None if bias is None else bias.clone()
    recording = record(lambda x, _: inflight_kernels.coded_linear(x, *own), num_inputs, dtype)
    return Program(library, recording, WeightPacker(library, [recording]))


@pytest.mark.parametrize("code", Code, ids=lambda code: code.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_inputs", "group_size", "scale_dtype", "zeros"), GROUPS)
def test_a_product_is_that_of_what_codes_mean_with_the_same_bits_everywhere(
    num_inputs: int,
    group_size: int,
    scale_dtype: torch.dtype,
    zeros: torch.dtype | None,
    code: Code,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_code = zeros if code in (Code.INT8, Code.INT4) else None
    weight = random_codes(code, 203, num_inputs, group_size=group_size, scale_dtype=scale_dtype, zeros=of_code)
    x, bias = inputs(max(COUNTS), num_inputs, dtype), inputs(1, 203, dtype)[0]
    meant = weight.dequantize().double()
    exact = x.double() @ meant.T + bias.double()
    magnitude = x.double().abs() @ meant.abs().T
    # NF4's levels are rounded to the type of the activations.
    rounded = exact.abs() + (magnitude if code is Code.NF4 else 0.0)
    bound = PRECISION[dtype] * rounded + 2**-20 * magnitude
    expected = None
    for of_dtype, variant, instruction in IN_ORDER_OF_FMA:
        if of_dtype != dtype:
            continue
        force(monkeypatch, instruction, variant)
        program = compiled(weight, dtype, bias)
        found = program(padded(x))
        assert ((found.double() - exact).abs() <= bound).all()
        expected = found if expected is None else expected
        for count in COUNTS:
            assert torch.equal(program(padded(x[:count])), expected[:count])


@pytest.mark.parametrize("code", Code, ids=lambda code: code.value)
def test_the_order_of_tiles_can_be_followed(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_codes(code, 96, 256), inputs(max(COUNTS), 256, torch.bfloat16)
    expected = None
    ways = [(variant, Instruction.FMA_AS_AMX) for variant in variants_here(torch.bfloat16)]
    if HAS_AMX:
        ways.append((AMX, Instruction.AMX))
    for variant, instruction in ways:
        force(monkeypatch, instruction, variant)
        program = compiled(weight, torch.bfloat16)
        expected = program(x) if expected is None else expected
        for count in COUNTS:
            assert torch.equal(program(x[:count]), expected[:count])


@pytest.mark.parametrize("code", [Code.INT8, Code.INT4, Code.FP4], ids=lambda code: code.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_codes_have_the_same_bits_in_any_batch(
    code: Code, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = inputs(8, 64, dtype)
    gate_up, down = random_codes(code, 8, 2 * 96, 64), random_codes(code, 8, 64, 96, group_size=32)

    def compute(x: Tensor, router: Tensor, gate_up: CodedWeight, down: CodedWeight) -> Tensor:
        chosen = inflight_kernels.route_experts(inflight_kernels.linear(x, router), 2)
        return inflight_kernels.fused_moe(x, *chosen, gate_up, down)

    x, answers = inputs(150, 64, dtype), []
    exact = compute(x, router, gate_up, down).float()
    for of_dtype, variant, instruction in IN_ORDER_OF_FMA:
        if of_dtype == dtype:
            force(monkeypatch, instruction, variant)
            own = router.clone(), copy_of(gate_up), copy_of(down)
            library, recording = load_library(dtype), record(lambda x, _, own=own: compute(x, *own), 64, dtype)
            program = Program(library, recording, WeightPacker(library, [recording]))
            answers.append(program(x))
            for count in (1, 2, 17, 33):
                assert torch.equal(program(x[:count]), answers[0][:count])
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert (answers[0].float() - exact).norm() < 2 * PRECISION[dtype] * exact.norm()


def test_gate_and_up_are_joined_with_zeros_behind_them() -> None:
    """The halves of an MLP whose size is no multiple of 32, in a format whose code 0 is not 0."""
    gate_up, down = random_codes(Code.NF4, 2 * 90, 64), random_codes(Code.NF4, 64, 90, group_size=96)

    def compute(x: Tensor) -> Tensor:
        gated = inflight_kernels.silu_and_mul(inflight_kernels.coded_linear(x, gate_up))
        return inflight_kernels.coded_linear(gated, down)

    x = inputs(40, 64, torch.float32)
    expected = compute(x)
    library, recording = load_library(torch.float32), record(lambda x, _: compute(x), 64, torch.float32)
    found = Program(library, recording, WeightPacker(library, [recording]))(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
