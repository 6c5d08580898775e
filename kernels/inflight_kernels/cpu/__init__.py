"""Networks in C++ for CPUs: compiled for instructions that the machine has, ahead for a wheel or at first use.

The torch reference is right on every machine. What it costs there is dozens of small operations between the matrix
products, products that lay their weights out anew, attention above the diagonal, and the interpreter between all of
them. Here a network's operations are recorded once (record.py), joined where C++ computes them together (fusions.py),
and become a program, which one call a step runs over weights laid out once (program.py, native/), in float32, float16
or bfloat16. It needs AVX2 or aarch64's NEON, and g++ or a wheel's libraries (prebuilt.py); variants.py has the sets of
instructions that it is compiled for, and instructions.py what multiplies bfloat16.

An operation is added in four places: its fields in operations.py, of which operation_header.py makes the structure that
C++ has, its function in a header and a case in native/program.cpp, and the method of a recorder that notes it. One
that C++ computes together with another also needs the rule in fusions.py that joins them.

Also what ranks on CPUs of one machine do together, through shared memory; that needs neither. Programs of several ranks
sum there too.
"""

from inflight_kernels.cpu.batch import Batch, Choices
from inflight_kernels.cpu.collectives import SharedMemoryCollectives, segment_bytes
from inflight_kernels.cpu.huge_pages import HugePageArena
from inflight_kernels.cpu.instructions import Instruction, Instructions, Order
from inflight_kernels.cpu.library import (
    NO_BFLOAT16,
    LibraryUnavailable,
    NativeLibrary,
    load_collectives,
    load_library,
    multiplies_bfloat16,
    unsupported_reason,
)
from inflight_kernels.cpu.program import Program, Workspace, most_tokens
from inflight_kernels.cpu.record import record
from inflight_kernels.cpu.recorded_values import HEAD_DIMS, STEP, Unsupported
from inflight_kernels.cpu.recording import Recording
from inflight_kernels.cpu.variants import VARIANTS, Variant, variants_here
from inflight_kernels.cpu.weight_packer import WeightMemory, WeightPacker, pack_weight

__all__ = [
    "HEAD_DIMS",
    "NO_BFLOAT16",
    "STEP",
    "VARIANTS",
    "Batch",
    "Choices",
    "HugePageArena",
    "Instruction",
    "Instructions",
    "LibraryUnavailable",
    "NativeLibrary",
    "Order",
    "Program",
    "Recording",
    "SharedMemoryCollectives",
    "Unsupported",
    "Variant",
    "WeightMemory",
    "WeightPacker",
    "Workspace",
    "load_collectives",
    "load_library",
    "most_tokens",
    "multiplies_bfloat16",
    "pack_weight",
    "record",
    "segment_bytes",
    "unsupported_reason",
    "variants_here",
]
