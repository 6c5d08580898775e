"""Products by each instruction: right, equal to the last bit where they must be, and chosen once or by force.

Run: pytest ci/unit/kernels/test_cpu_instructions.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from compiled_network import HAS_AMX, IN_ORDER_OF_FMA, INSTRUCTIONS, Network, force, needs_compiler
from kept_libraries import copy_libraries
from tiny_checkpoints import make_checkpoint
from torch import Tensor

import inflight_kernels
from inflight.errors import ConfigurationError
from inflight_kernels.cpu import (
    Instruction,
    Instructions,
    LibraryUnavailable,
    Order,
    Program,
    WeightPacker,
    instructions,
    load_library,
    record,
    variants_here,
)
from inflight_kernels.cpu.variants import AVX2, AVX512_BF16, DTYPES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In which nothing was measured yet."""
    folder = tmp_path_factory.mktemp("libraries")
    forced = {(variant, dtype) for dtype, variant, _ in IN_ORDER_OF_FMA}
    best = {(variant, dtype) for variant in variants_here()[:1] for dtype in DTYPES}
    in_order_of_tiles = {(variant, torch.bfloat16) for variant in variants_here()}
    copy_libraries(folder, forced | best | in_order_of_tiles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFLIGHT_CACHE_DIR", str(folder))
        patch.delenv(instructions.VARIABLE, raising=False)
        yield folder


class PackedLinear:
    """x @ weight.T in the weight's type, by one instruction."""

    def __init__(self, instruction: Instruction, weight: Tensor) -> None:
        library, own = load_library(weight.dtype, instruction), weight.clone()  # which packing frees
        recording = record(lambda x, _: inflight_kernels.linear(x, own), own.shape[1], own.dtype)
        self._program = Program(library, recording, WeightPacker(library, [recording]))

    def __call__(self, x: Tensor) -> Tensor:
        return self._program(x)


@needs_compiler
@pytest.mark.parametrize("instruction", INSTRUCTIONS)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 33, 130])
@pytest.mark.parametrize("num_outputs", [96, 203])
def test_a_packed_product_of_bfloat16_is_the_product(
    instruction: Instruction, num_tokens: int, num_outputs: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    weight = torch.randn(num_outputs, 64, generator=generator).bfloat16()
    x = torch.randn(num_tokens, 64, generator=generator).bfloat16()
    expected = (x.double() @ weight.double().T).float()
    packed = PackedLinear(instruction, weight)
    # One rounding of the result to bfloat16 is 2**-9 of it.
    torch.testing.assert_close(packed(x).float(), expected, rtol=2**-8, atol=1e-4)


def random_numbers(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


KINDS = ("what is left is what was rounded off", "sums grow out of denormal numbers", "denormal factors")


def factors(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (70, 512) and a weight (96, 512) of `dtype` whose products show what rounding of the result would hide."""
    x, weight = random_numbers(70, 512), random_numbers(96, 512)
    if kind == "what is left is what was rounded off":
        x[:, 256:], weight[:, 256:] = x[:, :256], -weight[:, :256]
    elif kind == "sums grow out of denormal numbers":
        factor = torch.finfo(dtype).tiny ** 0.5
        x, weight = factor * x.abs(), factor * weight.abs()
    elif kind == "denormal factors":
        x, weight = 0.25 * torch.finfo(dtype).tiny * x, 8.0 * weight
    return x.to(dtype), weight.to(dtype)


@needs_compiler
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, 2**-20), (torch.float16, 2**-11)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 33, 130])
def test_a_packed_product_of_other_types_is_the_product(dtype: torch.dtype, precision: float, num_tokens: int) -> None:
    x, weight = random_numbers(num_tokens, 64).to(dtype), random_numbers(203, 64).to(dtype)
    expected = x.double() @ weight.double().T
    packed = PackedLinear(Instruction.FMA, weight)
    torch.testing.assert_close(packed(x).double(), expected, rtol=precision, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_all_variants_instructions_and_numbers_of_rows_give_the_same_bits(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = factors(kind, dtype)
    expected = None
    for of_dtype, variant, instruction in IN_ORDER_OF_FMA:
        if of_dtype != dtype:
            continue
        force(monkeypatch, variant=variant)
        packed = PackedLinear(instruction, weight)
        if expected is None:
            expected = packed(x)
        for num_rows in (*range(1, 20), 32, 33, 70):
            assert torch.equal(packed(x[:num_rows]), expected[:num_rows])


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_all_variants_give_the_same_bits_in_the_order_of_tiles(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = factors(kind, torch.bfloat16)
    answers = []
    for variant in variants_here():
        force(monkeypatch, variant=variant)
        answers.append(PackedLinear(Instruction.FMA_AS_AMX, weight)(x))
    assert all(torch.equal(answer, answers[0]) for answer in answers)


@needs_compiler
@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_can_give_the_bits_of_tiles(kind: str) -> None:
    x, weight = factors(kind, torch.bfloat16)
    by_tiles, by_fma = (PackedLinear(by, weight) for by in (Instruction.AMX, Instruction.FMA_AS_AMX))
    expected = by_tiles(x)
    for num_rows in (*range(1, 20), 32, 33, 70):
        assert torch.equal(by_tiles(x[:num_rows]), expected[:num_rows])
        assert torch.equal(by_fma(x[:num_rows]), expected[:num_rows])


@needs_compiler
def test_denormals_stay_what_they_are_for_everybody_else() -> None:
    PackedLinear(Instruction.FMA, random_numbers(64, 64).bfloat16())(random_numbers(5, 64).bfloat16())
    assert (torch.tensor([1e-39]) * 1.0).item() != 0.0


needs_bfloat16 = pytest.mark.skipif(
    AVX512_BF16 not in variants_here(), reason="this processor has nothing to choose from for bfloat16"
)


@needs_compiler
@needs_bfloat16
def test_what_is_fastest_is_measured_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, variant=AVX512_BF16)
    measured = load_library().instructions
    assert measured.one_row in (Instruction.VDPBF16PS, Instruction.FMA)
    [kept] = cache.glob("cpu/*.json")
    kept.unlink()
    results = [Instructions.only(chosen) for chosen in (Instruction.FMA, Instruction.VDPBF16PS)]
    monkeypatch.setattr(instructions, "_measure", lambda library: results.pop(0))
    assert load_library().instructions.one_row is Instruction.FMA
    assert load_library().instructions.one_row is Instruction.FMA
    kept.unlink()
    assert load_library().instructions.one_row is Instruction.VDPBF16PS


@needs_compiler
@pytest.mark.parametrize("content", ["", "[]", "{}", '{"one_row": "fma"}', '{"one_row": 1, "few_rows": 1, "many": 1}'])
def test_a_broken_choice_is_made_anew(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, chosen = tmp_path / "decoder.json", Instructions.only(Instruction.FMA)
    kept.write_text(content)
    monkeypatch.setattr(instructions, "_measure", lambda library: chosen)
    library = load_library().functions
    assert instructions.choose(library, kept) == chosen
    assert json.loads(kept.read_text()) == chosen.names()
    assert list(tmp_path.iterdir()) == [kept]


@needs_compiler
def test_a_choice_that_cannot_be_kept_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = Instructions.only(Instruction.FMA)
    monkeypatch.setattr(instructions, "_measure", lambda library: chosen)
    library = load_library().functions
    assert instructions.choose(library, tmp_path / "missing" / "decoder.json") == chosen
    assert "cannot be kept" in caplog.text


@needs_compiler
@needs_bfloat16
def test_a_processor_whose_instructions_differ_keeps_to_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def multiply(library: CDLL, chosen: Instructions, x_BI: Tensor, packed: Tensor, out_BO: Tensor, **_: int) -> None:
        out_BO.fill_(1.0 if chosen.one_row is Instruction.FMA else 2.0)

    functions = load_library().functions
    monkeypatch.setattr(instructions, "multiply", multiply)
    assert instructions._measure(functions) == Instructions.only(Instruction.VDPBF16PS)
    assert "do not give the same bits" in caplog.text


@needs_compiler
@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
def test_tiles_take_all_products_but_those_of_one_row() -> None:
    assert load_library().instructions == Instructions(Instruction.FMA_AS_AMX, Instruction.AMX, Instruction.AMX)
    assert load_library(order=Order.FMA).instructions.many_rows in (Instruction.VDPBF16PS, Instruction.FMA)


@needs_compiler
def test_any_machine_can_follow_the_order_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, variant=AVX2)
    assert load_library(order=Order.AMX).instructions == Instructions.only(Instruction.FMA_AS_AMX)
    assert load_library(torch.float32, order=Order.AMX).instructions == Instructions.only(Instruction.FMA)


@needs_compiler
@needs_bfloat16
def test_the_environment_forces_an_instruction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama-wide", dtype=torch.bfloat16)
    for instruction in (Instruction.VDPBF16PS, Instruction.FMA):
        monkeypatch.setenv(instructions.VARIABLE, instruction.value)
        assert load_library().instructions == Instructions.only(instruction)
    monkeypatch.setenv(instructions.VARIABLE, "sse2")
    with pytest.raises(ConfigurationError, match="must be one of vdpbf16ps, fma, amx, fma_as_amx, got 'sse2'"):
        Network.load(checkpoint, "true", "bfloat16")


@needs_compiler
@pytest.mark.skipif(HAS_AMX, reason="this processor has AMX")
def test_amx_where_there_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(instructions.VARIABLE, "amx")
    with pytest.raises(LibraryUnavailable, match="there is no amx here; unset INFLIGHT_CPU_INSTRUCTION"):
        load_library()
