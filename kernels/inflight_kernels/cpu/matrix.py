"""The matrix of a product, as C++ has it too: packed weights of some format, with what groups of them share."""

from __future__ import annotations

import ctypes
import enum

from torch import Tensor

from inflight_kernels.cpu.fields import Fields

MAX_GROUP_SIZE = 512
"""Inputs of a group of codes. Larger ones are stored as several with the same scale."""
MAX_INTEGERS = 1 << 17
"""Inputs of a group that is multiplied in whole numbers: more might give sums beyond 32 bits."""


class WeightFormat(enum.IntEnum):
    """Of a matrix's weights: of the program's element type, or codes of 8 or 4 bits (native/codes.h)."""

    PLAIN = 0
    INT8 = 1
    FP8 = 2
    INT4 = 3
    FP4 = 4
    NF4 = 5


class InputFormat(enum.IntEnum):
    """Of the inputs that codes are multiplied with: elements, or quantised to 8 bits (native/integer_products.h)."""

    KEPT = 0
    INT8 = 1


class SharedFormat(enum.IntEnum):
    """Of what groups of codes share."""

    F32 = 0
    F16 = 1
    BF16 = 2
    INT8 = 3


class Matrix(ctypes.Structure):
    """Weights (outputs, inputs), packed as panels of 32 outputs, or several such matrices one after the other. Of codes
    each group of inputs has a scale, and maybe a zero, for each output: a weight is scale * (code - zero)."""

    _fields_ = Fields(
        ("const void*", "values"),
        ("const void*", "scales", "(panels, num_groups, 32); of plain weights null, and so are zeros."),
        ("const void*", "zeros", "(panels, num_groups, 32); null where all are 0."),
        ("WeightFormat", "format"),
        ("InputFormat", "inputs"),
        ("SharedFormat", "scale_format zero_format"),
        ("int64_t", "num_inputs", "A multiple of 32."),
        ("int64_t", "num_groups group_size", "Inputs of a group, 16 or a multiple of 32; the last one may have fewer."),
    )


def plain_matrix(packed: Tensor, num_inputs: int) -> Matrix:
    """Of the program's element type; `packed` must outlive it."""
    return Matrix(values=packed.data_ptr(), num_inputs=num_inputs)
