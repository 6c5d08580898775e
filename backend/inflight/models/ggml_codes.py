"""ggml's types of weights that are codes with a scale, and maybe a zero, for each 16 or 32 neighbours of a row: what
their blocks of bytes mean as a CodedWeight has it.

After the definitions in ggml (ggml-quants.c). A type of two numbers for a group, w = scale * q - least, has the zero
least / scale. Where a scale is the product of a float16 and a whole number, float32 holds it exactly. Legend: N blocks,
K numbers of a block, G groups of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inflight.gguf.tensor_types import TENSOR_TYPES, TensorType
from inflight.models.formats.coded import Coding
from inflight_kernels.matmul.coded_weight import Code

GROUP_SIZE = 32
"""Of most types; of the others a part of it."""
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
    coding: Coding
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


def _zeroed(numbers: Bytes, scales: Floats, least: Floats, *, is_centred: bool) -> Decoded:
    """scale * number - least. `is_centred`: codes are those of numbers less 8. Where the scale is 0, all numbers of the
    group are -1 times the least one."""
    scales, least = scales.astype(np.float32), least.astype(np.float32)
    is_flat = scales == 0
    shift = HALF_OF_4_BITS if is_centred else 0
    zeros = np.where(is_flat, 1.0, least / np.where(is_flat, 1.0, scales) - shift)
    codes = _centred(numbers) if is_centred else numbers
    if is_flat.any():  # seldom, and takes as long as all the rest
        by_group = codes.reshape(*scales.shape, -1)
        codes = np.where(is_flat[..., None], np.uint8(0), by_group).reshape(codes.shape)
    return Decoded(codes, np.where(is_flat, least, scales), zeros.astype(np.float32))


def _q8_0(blocks: Bytes) -> Decoded:
    return Decoded(blocks[:, 2:], _halves(blocks, 0))


def _q4_0(blocks: Bytes) -> Decoded:
    return Decoded(_centred(_nibbles(blocks[:, 2:])), _halves(blocks, 0))


def _q4_1(blocks: Bytes) -> Decoded:
    least = -_halves(blocks, 2).astype(np.float32)
    return _zeroed(_nibbles(blocks[:, 4:]), _halves(blocks, 0), least, is_centred=True)


def _five_bits(blocks: Bytes, first: int) -> Bytes:
    """Numbers from 0 to 31: their highest bits are in the four bytes from `first` on, the others behind these."""
    high = np.unpackbits(blocks[:, first : first + 4], axis=1, bitorder="little")
    return _nibbles(blocks[:, first + 4 :]) | high << np.uint8(4)


def _q5_0(blocks: Bytes) -> Decoded:
    codes = (_five_bits(blocks, 2).astype(np.int8) - 16).view(np.uint8)
    return Decoded(codes, _halves(blocks, 0))


def _q5_1(blocks: Bytes) -> Decoded:
    least = -_halves(blocks, 2).astype(np.float32)
    return _zeroed(_five_bits(blocks, 4), _halves(blocks, 0), least, is_centred=False)


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
    return _zeroed(_pairs_of_groups(blocks[:, 16:]), *_scales_of_k(blocks), is_centred=True)


def _q5_k(blocks: Bytes) -> Decoded:
    # Bit g of byte i is the highest one of number i of group g.
    high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2).reshape(len(blocks), -1)
    return _zeroed(_pairs_of_groups(blocks[:, 48:]) | high << np.uint8(4), *_scales_of_k(blocks), is_centred=False)


def _fields(packed: Bytes, width: int, bits: int) -> Bytes:
    """(N, B) to (N, 8 / bits * B): of each `width` bytes the lowest bits, then the next ones, up to the highest."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    by_run = packed.reshape(len(packed), -1, 1, width)
    found: Bytes = (by_run >> shifts & np.uint8(2**bits - 1)).reshape(len(packed), -1)
    return found


def _q2_k(blocks: Bytes) -> Decoded:
    # Of each byte in front the lower half is a group's scale, and the upper one its least number.
    unit, unit_of_least = (_halves(blocks, at).astype(np.float32) for at in (80, 82))
    scales, least = unit * (blocks[:, :16] & 15), unit_of_least * (blocks[:, :16] >> 4)
    return _zeroed(_fields(blocks[:, 16:80], GROUP_SIZE, 2), scales, least, is_centred=False)


def _q3_k(blocks: Bytes) -> Decoded:
    high = _fields(blocks[:, :32], GROUP_SIZE, 1)
    numbers = _fields(blocks[:, 32:96], GROUP_SIZE, 2) | high << np.uint8(2)  # from 0 to 7, which stand for -4 to 3
    scales = _fields(blocks[:, 96:104], 8, 4) | _fields(blocks[:, 104:108], 4, 2) << np.uint8(4)
    return Decoded(numbers - np.uint8(4) & np.uint8(15), _halves(blocks, 108) * (scales.astype(np.float32) - 32))


def _q6_k(blocks: Bytes) -> Decoded:
    numbers = _fields(blocks[:, :128], 64, 4) | _fields(blocks[:, 128:192], GROUP_SIZE, 2) << np.uint8(4)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return Decoded(numbers - np.uint8(32), _halves(blocks, 208) * scales.astype(np.float32))


def _mxfp4(blocks: Bytes) -> Decoded:
    return Decoded(_nibbles(blocks[:, 1:]), np.exp2(blocks[:, :1].astype(np.float32) - 127))


def _coding(code: Code, scale_dtype: torch.dtype, *, has_zeros: bool = False, group_size: int = GROUP_SIZE) -> Coding:
    return Coding(code=code, group_size=group_size, scale_dtype=scale_dtype, has_zeros=has_zeros)


_TYPES = {
    "Q8_0": CodedType(_coding(Code.INT8, torch.float16), _q8_0),
    "Q4_0": CodedType(_coding(Code.INT4, torch.float16), _q4_0),
    "Q4_1": CodedType(_coding(Code.INT4, torch.float32, has_zeros=True), _q4_1),
    "Q5_0": CodedType(_coding(Code.INT8, torch.float16), _q5_0),
    "Q5_1": CodedType(_coding(Code.INT8, torch.float32, has_zeros=True), _q5_1),
    "Q2_K": CodedType(_coding(Code.INT4, torch.float32, has_zeros=True, group_size=16), _q2_k),
    "Q3_K": CodedType(_coding(Code.INT4, torch.float32, group_size=16), _q3_k),
    "Q4_K": CodedType(_coding(Code.INT4, torch.float32, has_zeros=True), _q4_k),
    "Q5_K": CodedType(_coding(Code.INT8, torch.float32, has_zeros=True), _q5_k),
    "Q6_K": CodedType(_coding(Code.INT8, torch.float32, group_size=16), _q6_k),
    "MXFP4": CodedType(_coding(Code.FP4, torch.bfloat16), _mxfp4),
}
CODES: dict[TensorType, CodedType] = {kind: _TYPES[kind.name] for kind in TENSOR_TYPES.values() if kind.name in _TYPES}
"""Types that stay codes."""


def common_coding(kinds: Iterable[TensorType]) -> Coding | None:
    """Of weights of all these types in one product; None where they have no codes in common."""
    if any(kind not in CODES for kind in kinds):
        return None
    codings = {CODES[kind].coding for kind in kinds}
    codes, scale_dtypes = ({getattr(coding, name) for coding in codings} for name in ("code", "scale_dtype"))
    if len(codes) > 1 and not all(code.is_whole for code in codes):
        return None
    return Coding(
        code=codes.pop() if len(codes) == 1 else Code.INT8,
        group_size=min(coding.group_size for coding in codings),
        scale_dtype=scale_dtypes.pop() if len(scale_dtypes) == 1 else torch.float32,
        has_zeros=any(coding.has_zeros for coding in codings),
    )


def decode(blocks: Bytes, kind: TensorType, coding: Coding) -> Decoded:
    """What blocks of `kind` (N, bytes of one) mean, with that of their `common_coding` with others."""
    decoded, own = CODES[kind].decode(blocks), CODES[kind].coding
    codes, repeats = decoded.codes, own.group_size // coding.group_size
    if own.code is not coding.code:  # of 4 bits become those of 8
        codes = _centred(codes) - np.uint8(HALF_OF_4_BITS)
    zeros = np.zeros_like(decoded.scales) if decoded.zeros is None else decoded.zeros
    return Decoded(codes, decoded.scales.repeat(repeats, 1), zeros.repeat(repeats, 1) if coding.has_zeros else None)
