"""The sets of instructions that the C++ is compiled for, of x86-64 and aarch64. A library is for one of them, so that
any machine can run and test every lower one, too. All of them give the same bits (native/isa/isa.h), but for the order
of sums of AMX.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

VARIABLE = "INFLIGHT_CPU_VARIANT"
"""The environment variable that names one variant, instead of the best one that a processor has."""

_PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    needs: frozenset[str]
    """Flags of a processor, as Linux names them."""
    options: tuple[str, ...]
    """For g++."""

    def __str__(self) -> str:
        return self.name


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What each of them is compiled for."""
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_AVX2_OPTIONS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_OPTIONS = (*_AVX2_OPTIONS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_BF16_OPTIONS = (*_AVX512_OPTIONS, "-mavx512bf16", "-mavx512vnni")

AMX = Variant(
    "amx",
    _BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
    (*_BF16_OPTIONS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
)
AVX512_BF16 = Variant("avx512_bf16", _BF16, _BF16_OPTIONS)
AVX512 = Variant("avx512", _AVX512, _AVX512_OPTIONS)
AVX2_VNNI = Variant("avx2_vnni", _AVX2 | {"avx_vnni"}, (*_AVX2_OPTIONS, "-mavxvnni"))
AVX2 = Variant("avx2", _AVX2, _AVX2_OPTIONS)

# gcc schedules for aarch64 before it assigns registers, where loads that it moves ahead drive the sums of a product out
# of them: with one row 743 accesses to the stack beside 256 multiply-adds, and 34 without (gcc 12).
_UNSCHEDULED = "-fno-schedule-insns"
NEON = Variant("neon", frozenset({"asimd"}), ("-march=armv8-a", _UNSCHEDULED))
# A compiler for Armv8.2 takes atomics for granted.
NEON_DOTPROD = Variant("neon_dotprod", NEON.needs | {"asimddp", "atomics"}, ("-march=armv8.2-a+dotprod", _UNSCHEDULED))

OF_MACHINES: dict[str, tuple[Variant, ...]] = {
    "x86_64": (AMX, AVX512_BF16, AVX512, AVX2_VNNI, AVX2),
    "aarch64": (NEON_DOTPROD, NEON),
}
"""Machine, as `uname -m` names it: those of its architecture, the best first."""
VARIANTS = OF_MACHINES.get(platform.machine(), ())
"""Those of this machine's."""


def variants_here() -> list[Variant]:
    """Those that this processor has, the best first."""
    flags = processor_flags()
    return [each for each in VARIANTS if each.needs <= flags]


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
    return frozenset((_processor_line("flags") or _processor_line("Features")).split())


def processor_name() -> str:
    return _processor_line("model name")


def _processor_line(name: str) -> str:
    """Of the first processor; empty where the system does not say it."""
    try:
        lines = _PROCESSORS.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
