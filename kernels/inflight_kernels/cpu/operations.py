"""The operations that a program for CPUs consists of, and the batch that they compute.

The structures are those of native/operations.h, which documents them, field by field.
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_float, c_int64, c_void_p

from inflight_kernels.cpu.instructions import NativeInstructions


class Value(ctypes.Structure):
    _fields_ = (("buffer", c_int64), ("column", c_int64))


class Cache(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_size", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
    )


class Operation(ctypes.Structure):
    """Base of all operations. The first field, `kind`, is the operation's place in KINDS."""


class Embedding(Operation):
    _fields_ = (
        ("kind", c_int64),
        ("out", Value),
        ("table", c_void_p),
        *((name, c_int64) for name in ("first", "num_rows", "size")),
    )


class Sum(Operation):
    _fields_ = (("kind", c_int64), ("x", Value), ("size", c_int64))


class Gather(Operation):
    _fields_ = (("kind", c_int64), ("x", Value), ("out", Value), ("size", c_int64))


class Lora(Operation):
    _fields_ = (
        ("kind", c_int64),
        ("x", Value),
        ("narrow", Value),
        ("delta", Value),
        ("a", c_void_p),
        ("b", c_void_p),
        ("scales", c_void_p),
        ("ranks", c_void_p),
        ("num_inputs", c_int64),
        ("max_rank", c_int64),
        ("num_slices", c_int64),
        ("width_0", c_int64),
        ("width_1", c_int64),
        ("width_2", c_int64),
    )


_LINEAR = (
    ("kind", c_int64),
    ("x", Value),
    ("out", Value),
    ("delta", Value),
    ("weight", c_void_p),
    ("bias", c_void_p),
    ("num_inputs", c_int64),
    ("num_outputs", c_int64),
)


class Linear(Operation):
    _fields_ = _LINEAR


class GatedLinear(Operation):
    _fields_ = (*_LINEAR, ("num_deltas", c_int64))


_NORM = (
    ("kind", c_int64),
    ("x", Value),
    ("residual", Value),
    ("out", Value),
    ("sum", Value),
    ("weight", c_void_p),
    ("size", c_int64),
    ("eps", c_float),
)


class RmsNorm(Operation):
    _fields_ = _NORM


class NormOfSum(Operation):
    _fields_ = _NORM


class RopeAndKvWrite(Operation):
    _fields_ = (
        ("kind", c_int64),
        ("queries", Value),
        ("keys", Value),
        ("values", Value),
        ("cache", Cache),
        ("num_heads", c_int64),
        ("cos_sin", c_void_p),
        ("rotary_dim", c_int64),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("norm_eps", c_float),
    )


_ATTENTION = (
    ("kind", c_int64),
    ("queries", Value),
    ("out", Value),
    ("cache", Cache),
    ("num_heads", c_int64),
    ("sliding_window", c_int64),
    ("scale", c_float),
)


class DecodeAttention(Operation):
    _fields_ = _ATTENTION


class PrefillAttention(Operation):
    _fields_ = _ATTENTION


KINDS: tuple[type[Operation], ...] = (
    Embedding,
    Sum,
    Gather,
    Lora,
    Linear,
    GatedLinear,
    RmsNorm,
    NormOfSum,
    RopeAndKvWrite,
    DecodeAttention,
    PrefillAttention,
)


class Place(enum.IntEnum):
    """Where a buffer of a program lies."""

    PRIVATE = 0
    OWN_AREA = 1
    COMMON_AREA = 2


class Ranks(ctypes.Structure):
    _fields_ = (("segment", c_void_p), ("rank", c_int64), ("size", c_int64))


class NativeBatch(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_decodes", "num_prefills")),
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "block_table")),
        ("table_width", c_int64),
        *((name, c_void_p) for name in ("decode_rows", "decode_lens")),
        *((name, c_void_p) for name in ("prefill_rows", "prefill_lens", "prefill_starts")),
        *((name, c_void_p) for name in ("given", "given_rows")),
        ("adapters", c_void_p),
    )


class NativeProgram(ctypes.Structure):
    _fields_ = (
        ("num_operations", c_int64),
        ("num_buffers", c_int64),
        ("operations", c_void_p),
        ("widths", c_void_p),
        ("places", c_void_p),
        ("input", c_int64),
        ("output", c_int64),
        ("instructions", NativeInstructions),
        ("packed_at_once", c_int64),
        ("ranks", Ranks),
    )
