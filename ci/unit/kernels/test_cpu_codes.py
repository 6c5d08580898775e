"""Weights of 4 and 8 bits in C++: the product of what their codes mean, with the same bits in any batch, by all
variants and instructions.

Run: pytest ci/unit/kernels/test_cpu_codes.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_network import HAS_AMX, IN_ORDER_OF_FMA, force, needs_compiler
from torch import Tensor

import inflight_kernels
from inflight_kernels import Code, CodedWeight, Inputs, join_halves
from inflight_kernels.cpu import (
    HugePageArena,
    Instruction,
    Program,
    Unsupported,
    WeightPacker,
    load_library,
    record,
    variants_here,
)
from inflight_kernels.cpu.matrix import MAX_GROUP_SIZE
from inflight_kernels.cpu.variants import AMX
from inflight_kernels.moe.routing import Routing
from inflight_kernels.quantization.reference import quantize_per_token

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
    pytest.param(352, 128, torch.float16, None, id="a short last group, of no whole step of whole numbers"),
    pytest.param(1040, 16, torch.float32, None, id="half steps, the last one alone"),
    pytest.param(320, 16, torch.float32, torch.float32, id="half steps, zeros between numbers"),
]


WHOLE = [code for code in Code if code.is_whole]


def in_all_types_and_groups(test: Any) -> Any:
    for parameters in (
        pytest.mark.parametrize("dtype", PRECISION, ids=str),
        pytest.mark.parametrize(("num_inputs", "group_size", "scale_dtype", "zeros"), GROUPS),
    ):
        test = parameters(test)
    return test


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
@in_all_types_and_groups
def test_a_product_is_that_of_what_codes_mean_with_the_same_bits_everywhere(
    num_inputs: int,
    group_size: int,
    scale_dtype: torch.dtype,
    zeros: torch.dtype | None,
    code: Code,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if group_size < 32 and not code.is_whole:
        pytest.skip("groups of 16 are for whole numbers")
    of_code = zeros if code.is_whole else None
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


@pytest.mark.parametrize(("code", "group_size"), [*((code, 64) for code in Code), *((code, 16) for code in WHOLE)])
def test_the_order_of_tiles_can_be_followed(code: Code, group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.float32 if code.is_whole else None
    weight = random_codes(code, 96, 272, group_size=group_size, zeros=zeros)
    x = padded(inputs(max(COUNTS), 272, torch.bfloat16))
    expected = None
    ways = [(variant, Instruction.FMA_AS_AMX) for variant in variants_here()]
    if HAS_AMX:
        ways.append((AMX, Instruction.AMX))
    for variant, instruction in ways:
        force(monkeypatch, instruction, variant)
        program = compiled(weight, torch.bfloat16)
        expected = program(x) if expected is None else expected
        for count in COUNTS:
            assert torch.equal(program(x[:count]), expected[:count])


@pytest.mark.parametrize("code", WHOLE, ids=lambda code: code.value)
@in_all_types_and_groups
def test_products_of_whole_numbers_are_exact_with_the_same_bits_by_every_variant(
    num_inputs: int,
    group_size: int,
    scale_dtype: torch.dtype,
    zeros: torch.dtype | None,
    code: Code,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AMX's tiles too: sums of whole numbers have no order."""
    weight = random_codes(code, 203, num_inputs, group_size=group_size, scale_dtype=scale_dtype, zeros=zeros)
    weight = weight._replace(inputs=Inputs.INT8)
    x, bias = inputs(max(COUNTS), num_inputs, dtype), inputs(1, 203, dtype)[0]
    # Rows of nothing, with a number that leaves nothing of the others in its group, and with the smallest numbers.
    x[1], x[2, 5], x[3] = 0.0, 6e3, torch.finfo(dtype).tiny
    q, scales = quantize_per_token(x, torch.int8, group_size=group_size)
    taken = q.double() * scales.double().repeat_interleave(group_size, 1)[:, :num_inputs]
    meant = weight.dequantize().double()
    exact = taken @ meant.T + bias.double()
    magnitude = taken.abs() @ meant.abs().T
    expected = None
    for variant in variants_here():
        force(monkeypatch, variant=variant)
        program = compiled(weight, dtype, bias)
        found = program(padded(x))
        assert ((found.double() - exact).abs() <= PRECISION[dtype] * exact.abs() + 2**-20 * magnitude).all()
        expected = found if expected is None else expected
        for count in COUNTS:
            assert torch.equal(program(padded(x[:count])), expected[:count]), (variant, count)
    torch.testing.assert_close(inflight_kernels.coded_linear(x, weight, bias), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("code", WHOLE, ids=lambda code: code.value)
def test_the_extremes_of_whole_numbers_do_not_overflow(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    size, extremes = 4096, (127, -128) if code is Code.INT8 else (7, -8)
    numbers = torch.tensor(extremes).repeat_interleave(32)[:, None].expand(64, size)
    codes = (numbers & (2**code.bits - 1)).to(torch.uint8).contiguous()
    weight = CodedWeight(code, codes if code.bits == 8 else join_halves(codes), torch.ones(64, 1), None, size)
    x = torch.cat([torch.ones(6, size), -torch.ones(6, size)])
    for variant in variants_here():
        force(monkeypatch, variant=variant)
        found = compiled(weight._replace(inputs=Inputs.INT8), torch.float32)(x)
        assert torch.equal(found, x[:, :1] * numbers[:, 0] * size), variant


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_stays_so_when_inputs_are_quantised(
    wrong: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_codes(Code.INT8, 64, 256, group_size=128)._replace(inputs=Inputs.INT8)
    x = inputs(20, 256, dtype)
    for variant in variants_here():
        force(monkeypatch, variant=variant)
        program = compiled(weight, dtype)
        right, broken = program(x), x.clone()
        broken[7, 200] = wrong
        found = program(broken)
        assert found[7].isnan().all()
        assert torch.equal(found[8:], right[8:]) and torch.equal(found[:7], right[:7])


@pytest.mark.parametrize("code", [Code.INT8, Code.INT4, Code.FP4], ids=lambda code: code.value)
@pytest.mark.parametrize("taken", Inputs, ids=lambda taken: taken.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_codes_have_the_same_bits_in_any_batch(
    code: Code, taken: Inputs, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if taken is Inputs.INT8 and not code.is_whole:
        pytest.skip("other inputs are multiplied with whole numbers only")
    router = inputs(8, 64, dtype)
    gate_up, down = (
        random_codes(code, 8, 2 * 96, 64),
        random_codes(code, 8, 64, 96, group_size=16 if code.is_whole else 32),
    )
    gate_up, down = gate_up._replace(inputs=taken), down._replace(inputs=taken)

    def compute(x: Tensor, router: Tensor, gate_up: CodedWeight, down: CodedWeight) -> Tensor:
        chosen = inflight_kernels.route_experts(inflight_kernels.linear(x, router), Routing(num_chosen=2))
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
    # What is all but half way between two whole numbers may become either.
    precision = 2 * PRECISION[dtype] + (2**-9 if taken is Inputs.INT8 else 0.0)
    assert (answers[0].float() - exact).norm() < precision * exact.norm()


@pytest.mark.parametrize("code", Code, ids=lambda code: code.value)
@in_all_types_and_groups
def test_a_row_that_is_looked_up_is_what_its_codes_mean(
    num_inputs: int,
    group_size: int,
    scale_dtype: torch.dtype,
    zeros: torch.dtype | None,
    code: Code,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if group_size < 32 and not code.is_whole:
        pytest.skip("groups of 16 are for whole numbers")
    of_code = zeros if code.is_whole else None
    table = random_codes(code, 203, num_inputs, group_size=group_size, scale_dtype=scale_dtype, zeros=of_code)
    token_ids, first = torch.arange(40) * 61 % 256, 50
    expected = inflight_kernels.embedding(token_ids, table, first, 0.75, dtype=dtype)
    is_here = (token_ids >= first) & (token_ids < first + 203)
    meant = (table.dequantize(dtype)[token_ids[is_here] - first]) * 0.75
    assert torch.equal(expected[is_here], meant) and not expected[~is_here].any()
    for of_dtype, variant, instruction in IN_ORDER_OF_FMA:
        if of_dtype != dtype:
            continue
        force(monkeypatch, instruction, variant)
        own = copy_of(table)
        recording = record(
            lambda x, _, own=own: inflight_kernels.embedding(x, own, first, 0.75, dtype=dtype), None, dtype
        )
        library = load_library(dtype)
        assert torch.equal(Program(library, recording, WeightPacker(library, [recording]))(token_ids), expected)


def test_an_embedding_and_a_head_of_the_same_codes_are_in_memory_once() -> None:
    class Memory(HugePageArena):
        def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
            taken.append(num_elements * dtype.itemsize)
            return super().take(num_elements, dtype)

    taken: list[int] = []
    table = random_codes(Code.INT8, 96, 64)
    own, token_ids = copy_of(table), torch.tensor([3, 95, 40])
    embedding = record(lambda x, _: inflight_kernels.embedding(x, own), None, torch.float32)
    head = record(lambda x, _: inflight_kernels.coded_linear(x, own), 64, torch.float32)
    library = load_library(torch.float32)
    packer = WeightPacker(library, [embedding, head], Memory())
    hidden = Program(library, embedding, packer)(token_ids)
    assert torch.equal(hidden, table.dequantize()[token_ids])
    logits = Program(library, head, packer)(hidden)
    torch.testing.assert_close(logits, hidden @ table.dequantize().T)
    assert taken == [96 * 64, 96 * 2]
    assert own.codes.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("taken", Inputs, ids=lambda taken: taken.value)
@pytest.mark.parametrize("num_inputs", [256, 240])
def test_columns_in_another_order_give_the_bits_of_inputs_in_that_order(taken: Inputs, num_inputs: int) -> None:
    weight = random_codes(Code.INT4, 64, num_inputs, zeros=torch.int8)._replace(inputs=taken)
    order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(7)).int()
    reordered, x = copy_of(weight)._replace(permutation=order), inputs(40, num_inputs, torch.bfloat16)
    torch.testing.assert_close(reordered.dequantize()[:, order], weight.dequantize(), rtol=0, atol=0)
    library = load_library(torch.bfloat16)
    # The input is as wide as whole steps, of which the product reads the first columns in another order.
    recording = record(lambda x, _: inflight_kernels.coded_linear(x[:, :num_inputs], reordered), 256, torch.bfloat16)
    found = Program(library, recording, WeightPacker(library, [recording]))(padded(x))
    assert torch.equal(found, compiled(weight, torch.bfloat16)(padded(x[:, order])))
    reference = inflight_kernels.coded_linear(x, weight._replace(permutation=order))
    torch.testing.assert_close(found, reference, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("code", "group_size"), [(Code.INT8, 48), (Code.FP8, 16)])
def test_groups_of_other_sizes_are_not_for_cpp(code: Code, group_size: int) -> None:
    with pytest.raises(
        Unsupported, match=r"no codes of shape \(32, 96\) in groups of a multiple of 32, or of 16 whole"
    ):
        compiled(random_codes(code, 32, 96, group_size=group_size), torch.float32)


def test_gate_and_up_are_joined_with_zeros_behind_them() -> None:
    """The halves of an MLP whose size is no multiple of 32, in a format whose code 0 is not 0."""
    gate_up, down = random_codes(Code.NF4, 2 * 90, 64), random_codes(Code.NF4, 64, 90, group_size=96)

    def compute(x: Tensor) -> Tensor:
        gated = inflight_kernels.activate_and_mul(inflight_kernels.coded_linear(x, gate_up))
        return inflight_kernels.coded_linear(gated, down)

    x = inputs(40, 64, torch.float32)
    expected = compute(x)
    library, recording = load_library(torch.float32), record(lambda x, _: compute(x), 64, torch.float32)
    found = Program(library, recording, WeightPacker(library, [recording]))(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
