"""ggml's types of weights that are codes with a scale, and maybe a zero, for each 32 neighbours of a row: what their
blocks of bytes mean as a CodedWeight has it.

After the definitions in ggml (ggml-quants.c). A type of two numbers for a group, w = scale * q - least, has the zero
least / scale. Legend: N blocks, K numbers of a block, G groups of 32 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inflight.gguf.tensor_types import TENSOR_TYPES, TensorType
from inflight_kernels.matmul.coded_weight import Code

GROUP_SIZE = 32
HALF_OF_4_BITS = 8
"""Codes of whole numbers of 4 bits begin at minus this."""

Bytes = NDArray[np.uint8]
Floats = NDArray[Any]
"""float16 or float32."""


@dataclass(frozen=True, slots=True)
class Decoded:
    codes: Bytes
    """(N, K), one in each byte."""
    scales: Floats
    """(N, G)."""
    zeros: Floats | None = None


@dataclass(frozen=True, slots=True)
class CodedType:
    code: Code
    scale_dtype: torch.dtype
    has_zeros: bool
    decode: Callable[[Bytes], Decoded]
    """Of blocks (N, bytes of one)."""


def _halves(blocks: Bytes, first: int, count: int = 1) -> Floats:
    """`count` numbers of float16 from byte `first` on: (N, count)."""
    return np.ascontiguousarray(blocks[:, first : first + 2 * count]).view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """(N, B) to (N, 2 B): of each 16 bytes the lower halves, then the upper ones."""
    by_group = packed.reshape(len(packed), -1, GROUP_SIZE // 2)
    found: Bytes = np.concatenate([by_group & 15, by_group >> 4], -1).reshape(len(packed), -1)
    return found


def _centred(numbers: Bytes) -> Bytes:
    """Codes of the numbers from 0 to 15 less 8."""
    return numbers ^ np.uint8(HALF_OF_4_BITS)


def _zeroed(code: Code, numbers: Bytes, scales: Floats, least: Floats) -> Decoded:
    """scale * number - least. Where the scale is 0, all numbers of the group are -1 times the least one."""
    scales, least = scales.astype(np.float32), least.astype(np.float32)
    is_flat = scales == 0
    shift = HALF_OF_4_BITS if code is Code.INT4 else 0
    zeros = np.where(is_flat, 1.0, least / np.where(is_flat, 1.0, scales) - shift)
    codes = _centred(numbers) if code is Code.INT4 else numbers
    by_group = codes.reshape(len(codes), -1, GROUP_SIZE)
    flat_codes = np.where(is_flat[..., None], 0, by_group).astype(np.uint8).reshape(codes.shape)
    return Decoded(flat_codes, np.where(is_flat, least, scales), zeros.astype(np.float32))


def _q8_0(blocks: Bytes) -> Decoded:
    return Decoded(blocks[:, 2:], _halves(blocks, 0))


def _q4_0(blocks: Bytes) -> Decoded:
    return Decoded(_centred(_nibbles(blocks[:, 2:])), _halves(blocks, 0))


def _q4_1(blocks: Bytes) -> Decoded:
    return _zeroed(Code.INT4, _nibbles(blocks[:, 4:]), _halves(blocks, 0), -_halves(blocks, 2).astype(np.float32))


def _five_bits(blocks: Bytes, first: int) -> Bytes:
    """Numbers from 0 to 31: their highest bits are in the four bytes from `first` on, the others behind these."""
    high = np.unpackbits(blocks[:, first : first + 4], axis=1, bitorder="little")
    return _nibbles(blocks[:, first + 4 :]) | high << np.uint8(4)


def _q5_0(blocks: Bytes) -> Decoded:
    codes = (_five_bits(blocks, 2).astype(np.int8) - 16).view(np.uint8)
    return Decoded(codes, _halves(blocks, 0))


def _q5_1(blocks: Bytes) -> Decoded:
    return _zeroed(Code.INT8, _five_bits(blocks, 4), _halves(blocks, 0), -_halves(blocks, 2).astype(np.float32))


def _scales_of_k(blocks: Bytes) -> tuple[Floats, Floats]:
    """Of Q4_K and Q5_K: scales and least numbers (N, 8). Six bits for each of both, in the twelve bytes behind the
    float16 numbers that they are multiplied with."""
    packed = blocks[:, 4:16]
    first, second, upper = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, upper & 15 | first >> 6 << 4], 1)
    least = np.concatenate([second & 63, upper >> 4 | second >> 6 << 4], 1)
    unit, unit_of_least = (_halves(blocks, at).astype(np.float32) for at in (0, 2))
    return unit * scales, unit_of_least * least


def _pairs_of_groups(packed: Bytes) -> Bytes:
    """(N, 128) to (N, 256): of each 32 bytes the lower halves are a group, and the upper ones the next."""
    by_pair = packed.reshape(len(packed), -1, GROUP_SIZE)
    found: Bytes = np.stack([by_pair & 15, by_pair >> 4], 2).reshape(len(packed), -1)
    return found


def _q4_k(blocks: Bytes) -> Decoded:
    return _zeroed(Code.INT4, _pairs_of_groups(blocks[:, 16:]), *_scales_of_k(blocks))


def _q5_k(blocks: Bytes) -> Decoded:
    # Bit g of byte i is the highest one of number i of group g.
    high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2).reshape(len(blocks), -1)
    return _zeroed(Code.INT8, _pairs_of_groups(blocks[:, 48:]) | high << np.uint8(4), *_scales_of_k(blocks))


def _mxfp4(blocks: Bytes) -> Decoded:
    return Decoded(_nibbles(blocks[:, 1:]), np.exp2(blocks[:, :1].astype(np.float32) - 127))


_TYPES = {
    "Q8_0": CodedType(Code.INT8, torch.float16, False, _q8_0),
    "Q4_0": CodedType(Code.INT4, torch.float16, False, _q4_0),
    "Q4_1": CodedType(Code.INT4, torch.float32, True, _q4_1),
    "Q5_0": CodedType(Code.INT8, torch.float16, False, _q5_0),
    "Q5_1": CodedType(Code.INT8, torch.float32, True, _q5_1),
    "Q4_K": CodedType(Code.INT4, torch.float32, True, _q4_k),
    "Q5_K": CodedType(Code.INT8, torch.float32, True, _q5_k),
    "MXFP4": CodedType(Code.FP4, torch.bfloat16, False, _mxfp4),
}
CODES: dict[TensorType, CodedType] = {kind: _TYPES[kind.name] for kind in TENSOR_TYPES.values() if kind.name in _TYPES}
"""Types that stay codes."""
