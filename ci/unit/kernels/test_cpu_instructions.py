"""Products by each instruction: right, equal to the last bit where they must be, and chosen once or by force.

Run: pytest ci/unit/kernels/test_cpu_instructions.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_network import HAS_AMX, INSTRUCTIONS, Network, needs_compiler
from tiny_checkpoints import make_checkpoint
from torch import Tensor

import inflight_kernels
from inflight.errors import ConfigurationError
from inflight_kernels.cpu import (
    Instruction,
    Instructions,
    LibraryUnavailable,
    Program,
    WeightPacker,
    instructions,
    library,
    load_library,
    record,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("libraries")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFLIGHT_CACHE_DIR", str(folder))
        patch.delenv(instructions.VARIABLE, raising=False)
        yield folder


class PackedLinear:
    """x @ weight.T by one instruction."""

    def __init__(self, instruction: Instruction, weight: Tensor) -> None:
        library, own = load_library(instruction), weight.clone()  # which packing frees
        recording = record(lambda x, _: inflight_kernels.linear(x, own), own.shape[1])
        self._program = Program(library, recording, WeightPacker(library, [recording]))

    def __call__(self, x: Tensor) -> Tensor:
        return self._program(x)


@needs_compiler
@pytest.mark.parametrize("instruction", INSTRUCTIONS)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 33, 130])
@pytest.mark.parametrize("num_outputs", [96, 203])
def test_a_packed_product_is_the_product(instruction: Instruction, num_tokens: int, num_outputs: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    weight = torch.randn(num_outputs, 64, generator=generator).bfloat16()
    x = torch.randn(num_tokens, 64, generator=generator).bfloat16()
    expected = (x.double() @ weight.double().T).float()
    packed = PackedLinear(instruction, weight)
    # One rounding of the result to bfloat16 is 2**-9 of it.
    torch.testing.assert_close(packed(x).float(), expected, rtol=2**-8, atol=1e-4)


def random_numbers(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def factors(kind: str) -> tuple[Tensor, Tensor]:
    """x (70, 512) and a weight (96, 512) whose products show what rounding to bfloat16 would hide."""
    x, weight = random_numbers(70, 512), random_numbers(96, 512)
    if kind == "what is left is what was rounded off":
        x[:, 256:], weight[:, 256:] = x[:, :256], -weight[:, :256]
    elif kind == "sums grow out of denormal numbers":
        x, weight = 2.0**-64 * x.abs(), 2.0**-64 * weight.abs()
    elif kind == "denormal factors":
        x, weight = 2.0**-128 * x, 2.0**100 * weight
    return x.bfloat16(), weight.bfloat16()


@needs_compiler
@pytest.mark.parametrize(
    "kind", ["what is left is what was rounded off", "sums grow out of denormal numbers", "denormal factors"]
)
def test_instructions_for_vectors_and_any_number_of_rows_give_the_same_bits(kind: str) -> None:
    x, weight = factors(kind)
    by_vdpbf16ps, by_fma = (PackedLinear(by, weight) for by in (Instruction.VDPBF16PS, Instruction.FMA))
    expected = by_vdpbf16ps(x)
    for num_rows in (*range(1, 20), 32, 33, 70):
        assert torch.equal(by_vdpbf16ps(x[:num_rows]), expected[:num_rows])
        assert torch.equal(by_fma(x[:num_rows]), expected[:num_rows])


@needs_compiler
@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
@pytest.mark.parametrize(
    "kind", ["what is left is what was rounded off", "sums grow out of denormal numbers", "denormal factors"]
)
def test_vectors_can_give_the_bits_of_tiles(kind: str) -> None:
    x, weight = factors(kind)
    by_tiles, by_fma = (PackedLinear(by, weight) for by in (Instruction.AMX, Instruction.FMA_AS_AMX))
    expected = by_tiles(x)
    for num_rows in (*range(1, 20), 32, 33, 70):
        assert torch.equal(by_tiles(x[:num_rows]), expected[:num_rows])
        assert torch.equal(by_fma(x[:num_rows]), expected[:num_rows])


@needs_compiler
def test_denormals_stay_what_they_are_for_everybody_else() -> None:
    PackedLinear(Instruction.FMA, random_numbers(64, 64).bfloat16())(random_numbers(5, 64).bfloat16())
    assert (torch.tensor([1e-39]) * 1.0).item() != 0.0


def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library as on a processor that has none."""
    load = library._load

    def load_without(*arguments: Any) -> tuple[CDLL, Path]:
        functions, path = load(*arguments)
        functions.inflight_request_tiles = lambda: False
        return functions, path

    monkeypatch.setattr(library, "_load", load_without)


@needs_compiler
def test_what_is_fastest_is_measured_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_tiles(monkeypatch)
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
def test_a_processor_whose_instructions_differ_keeps_to_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def multiply(library: CDLL, chosen: Instructions, x_BI: Tensor, packed: Tensor, out_BO: Tensor, **_: int) -> None:
        out_BO.fill_(1.0 if chosen.one_row is Instruction.FMA else 2.0)

    monkeypatch.setattr(instructions, "multiply", multiply)
    assert instructions._measure(load_library().functions) == Instructions.only(Instruction.VDPBF16PS)
    assert "do not give the same bits" in caplog.text


@needs_compiler
@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
def test_tiles_take_all_products_but_those_of_one_row() -> None:
    assert load_library().instructions == Instructions(Instruction.FMA_AS_AMX, Instruction.AMX, Instruction.AMX)


@needs_compiler
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
    with pytest.raises(LibraryUnavailable, match="there is no AMX here for this process; unset INFLIGHT_CPU"):
        load_library()
