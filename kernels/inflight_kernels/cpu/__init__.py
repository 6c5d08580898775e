"""A decoder's layers in C++ for CPUs that multiply bfloat16: compiled for this very machine at first use, kept on disk.

The torch reference is right on every machine. What it costs there is dozens of small operations between the matrix
products, products that lay their weights out anew, attention above the diagonal, and the interpreter between all of
them. Here one call runs all layers over weights laid out once. Needs g++ and AVX-512 with bfloat16. AMX, vdpbf16ps
or float32 FMA multiplies, whichever is fast here.

Also what ranks on CPUs of one machine do together, through shared memory; that needs g++ alone.
"""

from inflight_kernels.cpu.collectives import SharedMemoryCollectives, segment_bytes
from inflight_kernels.cpu.decoder_stack import Batch, DecoderStack, LayerTensors, StackShape
from inflight_kernels.cpu.huge_pages import HugePageArena
from inflight_kernels.cpu.instructions import Instruction, Instructions
from inflight_kernels.cpu.library import (
    LibraryUnavailable,
    NativeLibrary,
    load_collectives,
    load_library,
    unsupported_reason,
)
from inflight_kernels.cpu.packed_weight import STEP, PackedWeight

__all__ = [
    "STEP",
    "Batch",
    "DecoderStack",
    "HugePageArena",
    "Instruction",
    "Instructions",
    "LayerTensors",
    "LibraryUnavailable",
    "NativeLibrary",
    "PackedWeight",
    "SharedMemoryCollectives",
    "StackShape",
    "load_collectives",
    "load_library",
    "segment_bytes",
    "unsupported_reason",
]
