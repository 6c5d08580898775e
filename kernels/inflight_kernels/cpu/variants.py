"""The sets of instructions that the C++ is compiled for. A library is for one of them, so that any machine can run and
test every lower one, too. All of them give the same bits (native/isa/isa.h), but for the order of sums of AMX.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

VARIABLE = "INFLIGHT_CPU_VARIANT"
"""The environment variable that names one variant, instead of the best one that a processor has."""


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    needs: frozenset[str]
    """Flags of a processor, as Linux names them."""
    options: tuple[str, ...]
    """For g++."""
    dtypes: tuple[torch.dtype, ...]
    """What it computes in; in other types a lower one is as good."""

    def __str__(self) -> str:
        return self.name


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_bf16"}
_AVX2_OPTIONS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_OPTIONS = (*_AVX2_OPTIONS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_BF16_OPTIONS = (*_AVX512_OPTIONS, "-mavx512bf16")

AMX = Variant(
    "amx",
    _BF16 | {"amx_tile", "amx_bf16"},
    (*_BF16_OPTIONS, "-mamx-tile", "-mamx-bf16"),
    (torch.bfloat16,),
)
AVX512_BF16 = Variant("avx512_bf16", _BF16, _BF16_OPTIONS, (torch.bfloat16,))
AVX512 = Variant("avx512", _AVX512, _AVX512_OPTIONS, DTYPES)
AVX2 = Variant("avx2", _AVX2, _AVX2_OPTIONS, DTYPES)
VARIANTS = (AMX, AVX512_BF16, AVX512, AVX2)
"""The best first."""


def variants_here(dtype: torch.dtype | None = None) -> list[Variant]:
    """Those that this processor has, the best first. `dtype`: those that are for it."""
    flags = processor_flags()
    return [each for each in VARIANTS if each.needs <= flags and (dtype is None or dtype in each.dtypes)]


def forced_variant() -> Variant | None:
    """What the environment asks for. Raises ValueError for a word that names none, or one that is not here."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    variant = next((each for each in VARIANTS if each.name == named), None)
    if variant is None:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(each.name for each in VARIANTS)}, got {named!r}")
    if missing := variant.needs - processor_flags():
        raise ValueError(f"{VARIABLE} is {named}, and this processor has no {', '.join(sorted(missing))}")
    return variant


def processor_flags() -> frozenset[str]:
    """What the system lets processes use of the processor, as Linux names it."""
    return frozenset(_processor_line("flags").split())


def processor_name() -> str:
    return _processor_line("model name")


def _processor_line(name: str) -> str:
    """Of the first processor; empty where the system does not say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
