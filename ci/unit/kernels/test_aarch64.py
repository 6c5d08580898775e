"""The C++ for aarch64, by a cross compiler and an emulator: nothing to warn of, and the bits of AVX2. No such processor
has run it here.

Run: pytest ci/unit/kernels/test_aarch64.py
"""

from __future__ import annotations

import functools
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aarch64
import pytest
import torch
from compiled_network import needs_compiler

from inflight_kernels.cpu import Variant, library, variants, variants_here
from inflight_kernels.cpu.library import program_options

pytestmark = [pytest.mark.slow, pytest.mark.long]

DIGESTS = Path(aarch64.__file__).parent / "native_digests" / "main.cpp"
PROGRAM, COLLECTIVES = (str(library._SOURCES / name) for name in ("program.cpp", "collectives.cpp"))
# gcc 12 finds its own intrinsics to be uninitialized. At -O3 it would take three times as long.
OPTIONS = ("-O1", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized", *library.LANGUAGE)


def arguments(variant: Variant, dtype: torch.dtype, built: Path) -> list[str]:
    options = [*OPTIONS, *program_options(variant, dtype), f"-I{library._SOURCES}"]
    return [*options, str(DIGESTS), PROGRAM, "-o", str(built)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("digests")


@functools.cache
def by_avx2(dtype: torch.dtype, folder: Path) -> list[str]:
    built = folder / f"avx2-{dtype}"
    subprocess.run([*library._find_compiler(), *arguments(variants.AVX2, dtype, built)], check=True)
    return subprocess.run([built], capture_output=True, text=True, check=True).stdout.splitlines()


def by_emulator(variant: Variant, dtype: torch.dtype, folder: Path) -> list[str]:
    toolchain, built = aarch64.find(), folder / f"{variant}-{dtype}"
    compiled = toolchain.compile(*arguments(variant, dtype, built))
    assert (compiled.returncode, compiled.stderr) == (0, "")
    return toolchain.run(built).splitlines()


@needs_compiler
@pytest.mark.skipif(variants.AVX2 not in variants_here(), reason="this processor has no AVX2 to compare with")
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        (variants.NEON, torch.float32),
        (variants.NEON, torch.float16),
        (variants.NEON_DOTPROD, torch.bfloat16),
    ],
    ids=str,
)
def test_every_function_product_and_operation_has_the_bits_of_avx2(
    variant: Variant, dtype: torch.dtype, folder: Path
) -> None:
    aarch64.find()
    with ThreadPoolExecutor() as both:
        expected = both.submit(by_avx2, dtype, folder)
        found = both.submit(by_emulator, variant, dtype, folder).result()
    assert len(found) > 100 and found == expected.result()


@pytest.mark.parametrize("variant", variants.OF_MACHINES["aarch64"], ids=str)
def test_collectives_are_compiled(variant: Variant, folder: Path) -> None:
    options = [*library._OPTIONS, *variant.options, "-Wall", "-Wextra", COLLECTIVES]
    compiled = aarch64.find().compile(*options, "-o", str(folder / "collectives.so"))
    assert (compiled.returncode, compiled.stderr) == (0, "")
