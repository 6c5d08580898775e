"""Which instruction multiplies which products of bfloat16: measured once on a machine and kept, or forced. Other types
are multiplied by float32 FMA.

Processors differ: in GFLOP/s a thread, vdpbf16ps and float32 FMA give 80 and 166 on a Xeon with AVX-512 for bfloat16
and without AMX, 424 and 233 on Zen 5. Both give the same bits (native/vector_products.h), so a choice that turns out
otherwise at the next start, or on another rank, changes no token. AMX adds up in another order: where there is some it
takes all products but those of one row, by rule and not by measurement.
"""

from __future__ import annotations

import ctypes
import enum
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from inflight_kernels.cpu.fields import Fields
from inflight_kernels.cpu.huge_pages import HugePageArena
from inflight_kernels.cpu.matrix import plain_matrix
from inflight_kernels.cpu.variants import AMX, AVX512_BF16

logger = logging.getLogger(__name__)

VARIABLE = "INFLIGHT_CPU_INSTRUCTION"
"""The environment variable that names one instruction for all products of bfloat16."""


class Order(str, enum.Enum):
    """In which products of bfloat16 add up."""

    AUTO = "auto"
    """That of AMX where there is AMX, else that of FMA."""
    FMA = "fma"
    AMX = "amx"


class Instruction(str, enum.Enum):
    """What multiplies."""

    VDPBF16PS = "vdpbf16ps"
    FMA = "fma"
    AMX = "amx"
    FMA_AS_AMX = "fma_as_amx"
    """FMA in the order of AMX's sums: equal bits."""

    @property
    def needs(self) -> frozenset[str]:
        """Flags that a variant must have for it."""
        return {Instruction.VDPBF16PS: AVX512_BF16.needs, Instruction.AMX: AMX.needs}.get(self, frozenset())


@dataclass(frozen=True, slots=True)
class Instructions:
    """What multiplies in each class of products."""

    one_row: Instruction
    few_rows: Instruction
    """2 to 32: memory is read once for all of them."""
    many_rows: Instruction

    @classmethod
    def only(cls, instruction: Instruction) -> Instructions:
        return cls(instruction, instruction, instruction)

    @property
    def order(self) -> Order:
        """The same for all classes."""
        return Order.AMX if self.one_row is Instruction.FMA_AS_AMX or self.one_row is Instruction.AMX else Order.FMA

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} by {value}" for name, value in self.names().items())

    def names(self) -> dict[str, str]:
        return {name: instruction.value for name, instruction in asdict(self).items()}

    @classmethod
    def with_tiles(cls) -> Instructions:
        """Where there is AMX. A single row waits for memory, which vectors read faster than tiles."""
        return cls(Instruction.FMA_AS_AMX, Instruction.AMX, Instruction.AMX)

    def to_native(self) -> NativeInstructions:
        numbers = list(Instruction)
        return NativeInstructions(**{name: numbers.index(instruction) for name, instruction in asdict(self).items()})


class NativeInstructions(ctypes.Structure):
    """The instruction for each class of products. Few rows wait for memory, which is read once for all of them; more
    read weights from the second cache."""

    _fields_ = Fields(("Instruction", "one_row few_rows many_rows"))


def forced_instruction() -> Instruction | None:
    """What the environment asks for. Raises ValueError for a word that names none."""
    named = os.environ.get(VARIABLE)
    try:
        return Instruction(named) if named else None
    except ValueError:
        words = ", ".join(instruction.value for instruction in Instruction)
        raise ValueError(f"{VARIABLE} must be one of {words}, got {named!r}") from None


def choose(library: ctypes.CDLL, kept: Path) -> Instructions:
    """vdpbf16ps or FMA, whichever is faster in each class, as `kept` says, or measured now and written there."""
    try:
        words = json.loads(kept.read_text(encoding="ascii"))
        chosen = Instructions(**{name: Instruction(word) for name, word in words.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        # None is kept, or what is kept is broken.
        chosen = _measure(library)
        try:
            written = kept.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(chosen.names()), encoding="ascii")
            os.replace(written, kept)
        except OSError as error:
            logger.warning("the choice of instructions cannot be kept and is made anew at each start: %s", error)
    return chosen


_INPUTS = 1024
_CASES = {"one_row": (1, 32768), "few_rows": (16, 32768), "many_rows": (128, 1024)}
"""Class: rows and output features. 64 MiB of weights come from memory, as when a step decodes, 2 MiB from a cache."""
_REPEATS = 5


@torch.inference_mode()
def _measure(library: ctypes.CDLL) -> Instructions:
    """Whichever took less time at its best, in turns; about 0.2 s.

    Of one thread, and its own time: on a busy machine threads mostly wait for others, and a wrong choice would stay.
    """
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(1)
    some = torch.randn(_INPUTS, _INPUTS, generator=generator).bfloat16()
    most = max(num_outputs for _, num_outputs in _CASES.values())
    # Any bfloat16 are a packed weight.
    packed = HugePageArena().take(most * _INPUTS, torch.bfloat16).copy_(some.flatten().repeat(most // _INPUTS))
    chosen = {}
    for name, (num_rows, num_outputs) in _CASES.items():
        seconds = {instruction: float("inf") for instruction in (Instruction.VDPBF16PS, Instruction.FMA)}
        out = {instruction: torch.empty(num_rows, num_outputs, dtype=torch.bfloat16) for instruction in seconds}
        for _ in range(_REPEATS):
            for instruction in seconds:
                before = time.thread_time()
                multiply(library, Instructions.only(instruction), some, packed, out[instruction], num_threads=1)
                seconds[instruction] = min(seconds[instruction], time.thread_time() - before)
        if not torch.equal(*out.values()):
            logger.warning("vdpbf16ps and FMA do not give the same bits on this processor: vdpbf16ps multiplies alone")
            return Instructions.only(Instruction.VDPBF16PS)
        chosen[name] = min(seconds, key=seconds.__getitem__)
        rates = ", ".join(
            f"{instruction.value} {2e-9 * num_rows * num_outputs * _INPUTS / best:.0f}"
            for instruction, best in seconds.items()
        )
        logger.info("GFLOP/s a thread of products of %d rows: %s", num_rows, rates)
    logger.info("instructions were chosen after %.2f s", time.perf_counter() - started)
    return Instructions(**chosen)


def are_right(library: ctypes.CDLL, dtype: torch.dtype, chosen: Instructions) -> bool:
    """Whether each of them gives the products of small whole numbers, which no rounding changes."""
    whole = torch.arange(-512, 512).view(32, 32).remainder(7).sub(3).to(dtype)
    x, packed = torch.cat([whole, torch.zeros_like(whole)]), torch.empty(32 * 32, dtype=dtype)
    library.inflight_pack(whole.data_ptr(), 32, 32, False, 1, packed.data_ptr())
    for instruction in {chosen.one_row, chosen.few_rows, chosen.many_rows}:
        out = torch.empty(32, 32, dtype=dtype)
        multiply(library, Instructions.only(instruction), x, packed, out, num_threads=1)
        if not torch.equal(out.double(), whole.double() @ whole.double().T):
            return False
    return True


def multiply(
    library: ctypes.CDLL, instructions: Instructions, x_BI: Tensor, packed: Tensor, out_BO: Tensor, *, num_threads: int
) -> None:
    """x @ weight.T into `out_BO`, all of the library's type and contiguous; x has 32 rows more than `out_BO`."""
    library.inflight_linear(
        ctypes.byref(instructions.to_native()),
        x_BI.data_ptr(),
        out_BO.shape[0],
        ctypes.byref(plain_matrix(packed, x_BI.shape[1])),
        out_BO.shape[1],
        num_threads,
        out_BO.data_ptr(),
    )
