"""Makes triton's interpreter compute as a GPU does where the two differ and tests can tell, in any order, and in half
the time.

Rounding to float8_e4m3fn: the interpreter of triton 3.6 to 3.8 rounds ties away from zero and loses the carry out of
the mantissa (127.99 becomes 64); a GPU rounds to nearest, ties to even, and saturates, as torch does to a value clamped
before. Reading NaN: the interpreter finds 480 where a GPU finds NaN.

Dot products: the interpreter multiplies matrices with numpy's BLAS, some of whose kernels (OpenBLAS on AMD's Zen) sum a
row in another order when it stands at another place of the tile. On a GPU a row of `tl.dot` does not depend on its
place, which is what the deterministic modes rest on.

Time: the interpreter puts its own functions in place of the language's at each launch and at each call of one kernel's
function by another, and searches the whole language for them each time: a third of a step of a tiny network. It also
computes each sum of integers again in 64 bits, for an assertion that it then leaves out, as it does all of
`tl.device_assert` without `debug`: a sixth. And it makes a table of all types whenever it looks for one of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._convert_float
FP8_NAN = 0x7F
"""The bits of NaN in float8_e4m3fn, but for the sign."""


def _convert_float(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    if source == tl.float8e4nv:
        found = _convert(values, source, target, rounding_mode)
        bits = np.ascontiguousarray(values).view(np.uint8)
        found[(bits & FP8_NAN) == FP8_NAN] = (1 << (target.primitive_bitwidth - 1)) - 1  # all but the sign: a NaN
        return found
    if source != tl.float32 or target != tl.float8e4nv:
        return _convert(values, source, target, rounding_mode)
    # A view and not a copy of bits that the handle may give as an integer.
    wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).clamp(-448.0, 448.0)
    return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right = (_widened(operand) for operand in (a, b))
    # Without `optimize` einsum calls no BLAS: each element is summed by the same loop.
    product = np.einsum("...ij,...jk->...ik", left, right, dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _widened(operand: Any) -> Any:
    """float8, which numpy does not know, as float16; everything else as it is."""
    if operand.dtype.primitive_bitwidth == 8 and operand.dtype.is_floating():
        return interpreter._convert_float(operand.data, operand.dtype, tl.float16, None).view(np.float16)
    return operand.data


_scalar_dtype = functools.cache(interpreter._get_np_dtype)


def _numpy_dtype(dtype: Any) -> Any:
    """Of a scalar, block or pointer of the language."""
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _scalar_dtype(dtype.scalar)


_NOTHING_PATCHED = SimpleNamespace(restore=lambda: None)


@functools.cache
def repair() -> None:
    """Put all of this in place of the interpreter's own, for this process."""
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter._get_np_dtype = _numpy_dtype
    # Both names that a kernel's module can have for the language: its own functions call each other by the second one.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: _NOTHING_PATCHED
    options = interpreter.interpreter_builder.options
    assert not options.debug, "then the interpreter does assert that sums fit"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


@contextmanager
def in_random_order() -> Iterator[None]:
    """Meanwhile the programs of each launch run in a random order, as they may on a GPU; alone they run in that of the
    grid."""
    builder = interpreter.interpreter_builder
    set_size, set_place = builder.set_grid_dim, builder.set_grid_idx
    places: dict[tuple[int, ...], tuple[int, ...]] = {}

    def set_grid_dim(*size: int) -> None:
        grid = list(itertools.product(*(range(length) for length in size)))
        places.clear()
        places.update(zip(grid, (grid[index] for index in torch.randperm(len(grid)).tolist()), strict=True))
        set_size(*size)

    def set_grid_idx(*place: int) -> None:
        set_place(*places[place])

    with (
        mock.patch.object(builder, "set_grid_dim", set_grid_dim),
        mock.patch.object(builder, "set_grid_idx", set_grid_idx),
    ):
        yield
