"""What a program for CPUs is given: its operations and buffers, the batch of a step, the ranks; and all structures
together, which C++ has too.

`python -m inflight_kernels.cpu.operation_header` writes native/operation_fields.h after them, docstrings and comments
included.
"""

from __future__ import annotations

import ctypes
import enum

from inflight_kernels.cpu.fields import Fields, layout_of
from inflight_kernels.cpu.instructions import NativeInstructions
from inflight_kernels.cpu.matrix import Matrix
from inflight_kernels.cpu.operations import KINDS, Cache, NativeNormWeight, Operation, Value


class NativeSequences(ctypes.Structure):
    """Whose tokens a step has, as StepSequences says; none where no layer keeps a state for each."""

    _fields_ = Fields(
        ("int64_t", "count"),
        ("const int64_t*", "slots", "(count): where each one's state is."),
        ("const int32_t*", "starts", "(count + 1): where tokens start."),
        ("const int64_t*", "positions", "(num_tokens): a state before position 0 is zeros."),
        (
            "const int32_t*",
            "kept",
            "(num_tokens): another slot that takes the state behind a token too, negative = none; null = of no token.",
        ),
    )


class NativeBlocks(ctypes.Structure):
    """Where layers of one group keep what they keep of a step's tokens, see StepBlocks."""

    _fields_ = Fields(
        ("const int64_t*", "slots", "(num_tokens): cache slot, negative = not stored."),
        ("const int32_t*", "table", "(any number of rows, width): ids of each row's blocks."),
        ("int64_t", "width", "Elements between two rows of the table."),
    )


class NativeBatch(ctypes.Structure):
    """Tokens of a step: one of each decoding row, then the chunks of the prefilling rows."""

    _fields_ = Fields(
        ("int64_t", "num_tokens num_decodes num_prefills"),
        (
            "const int64_t*",
            "token_ids positions",
            "(num_tokens) each: token id; position in the sequence.",
        ),
        ("const Blocks*", "blocks", "Of each group of layers."),
        ("const int64_t*", "decode_rows", "(num_decodes): row of the block table."),
        ("const int32_t*", "decode_lens", "(num_decodes): tokens in the cache."),
        ("const int64_t*", "prefill_rows", "(num_prefills): row of the block table."),
        ("const int32_t*", "prefill_lens", "(num_prefills): tokens in the cache."),
        (
            "const int32_t*",
            "prefill_starts",
            "(num_prefills + 1): where tokens start, counted from the first prefilling token.",
        ),
        (
            "const int64_t*",
            "given",
            "(num_tokens): row of `given_rows` that is a token's embedding, negative = the table's; null = all are the "
            "table's.",
        ),
        ("const Element*", "given_rows"),
        (
            "const int32_t*",
            "adapters",
            "(num_tokens): slot of each token's adapter, negative = none; null where no token has one.",
        ),
        ("const int64_t*", "token_types", "(num_tokens); null = all are 0."),
        (NativeSequences, "sequences"),
        (
            "const int32_t*",
            "experts",
            "(num_tokens, num_chosen): of each token, where no router of the program chooses them; else null.",
        ),
        ("const float*", "expert_weights", "(num_tokens, num_chosen), theirs."),
    )


class Place(enum.IntEnum):
    """Where a buffer is: in memory of this rank alone, in its area, or, of many rows, in the common one."""

    PRIVATE = 0
    OWN_AREA = 1
    COMMON_AREA = 2


class Ranks(ctypes.Structure):
    """The memory that ranks share (rank_segment.h), and which of them this is; null without other ranks."""

    _fields_ = Fields(("char*", "segment"), ("int64_t", "rank size"))


class NativeProgram(ctypes.Structure):
    """Operations in order, over buffers."""

    _fields_ = Fields(
        ("int64_t", "num_operations num_buffers"),
        ("const Kind* const*", "operations", "(num_operations): each points to the first field of an operation."),
        ("const int64_t*", "widths", "(num_buffers): columns of each."),
        ("const Place*", "places", "(num_buffers): where each is."),
        ("int64_t", "input", "The buffer that holds the program's input at first, -1 if that is the token ids."),
        ("int64_t", "output", "The buffer of its result."),
        (NativeInstructions, "instructions"),
        (
            "int64_t",
            "packed_at_once",
            "Elements of keys and values that prompts may have packed at the same time; a single chunk may have more.",
        ),
        (Ranks, "ranks"),
    )


def structure_of(kind: type[Operation]) -> type[Operation]:
    """The one that declares its last fields."""
    return next(each for each in kind.__mro__ if "_fields_" in vars(each))


STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    NativeInstructions,
    Value,
    Matrix,
    Cache,
    NativeNormWeight,
    *dict.fromkeys(map(structure_of, KINDS)),
    NativeSequences,
    NativeBlocks,
    NativeBatch,
    Ranks,
    NativeProgram,
)
"""All that C++ has too, each behind those that it consists of."""


def layout() -> dict[str, int]:
    """Sizes and offsets of all structures: C++'s expressions for them, and Python's numbers."""
    return dict(pair for structure in STRUCTURES for pair in layout_of(structure))
