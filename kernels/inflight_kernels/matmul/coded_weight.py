"""Weights whose elements are codes of 4 or 8 bits, as they are kept before a CPU's panels (cpu/weight_packer.py).

A code stands for a number, the same wherever it is. The codes of a group of neighbouring columns share a scale and, in
formats that have it, a zero, for each row:

    w[n, k] = scale[n, g] * (number(code[n, k]) - zero[n, g])      g the group of k

Where a group's columns are no neighbours in the matrix (act-order of GPTQ), the stored ones are in another order than
those of x.

    int8   whole numbers from -128 to 127         fp4   1 sign, 2 exponent and 1 mantissa bit (OCP MX, E2M1)
    int4   whole numbers from -8 to 7             nf4   16 levels of a normal distribution (QLoRA, arXiv 2305.14314)
    fp8    1 sign, 4 exponent and 3 mantissa bits, without infinities (float8_e4m3fn)

Knows no device and no checkpoint. Legend: N output features, K input features, G groups of K.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4_NUMBERS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Dettmers et al. 2023, arXiv 2305.14314, appendix E."""


class Code(enum.Enum):
    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"
    FP4 = "fp4"
    NF4 = "nf4"

    @property
    def bits(self) -> int:
        return 8 if self in (Code.INT8, Code.FP8) else 4

    @property
    def is_whole(self) -> bool:
        """Whether all of them stand for whole numbers, which products may add up as such."""
        return self in (Code.INT8, Code.INT4)

    @property
    def of_zero(self) -> int:
        """The code that stands for 0."""
        return NF4_NUMBERS.index(0.0) if self is Code.NF4 else 0

    def numbers(self) -> Tensor:
        """(2 ** bits,) float32: what each code stands for."""
        match self:
            case Code.INT8:
                return torch.arange(256, dtype=torch.uint8).view(torch.int8).float()
            case Code.FP8:
                return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            case Code.INT4:
                return torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float32)
            case Code.FP4:
                return torch.tensor(FP4_NUMBERS)
            case Code.NF4:
                return torch.tensor(NF4_NUMBERS)


class Inputs(enum.Enum):
    """What products take of their inputs."""

    KEPT = "kept"
    """They, as they are."""
    INT8 = "int8"
    """Whole numbers: each token and each group that has a scale of the weight is quantised by itself, as by
    `quantize_per_token`. So products are of whole numbers, which are exact, if the codes are, too."""


class CodedWeight(NamedTuple):
    """A weight (N, K), or several (E, N, K), whose tensors then all have the leading dimension E."""

    code: Code
    codes: Tensor
    """uint8: (N, K), or, of 4 bits, (N, K / 2) with the even column in the lower half of a byte."""
    scales: Tensor
    """(N, G), float32, float16 or bfloat16."""
    zeros: Tensor | None
    """(N, G) int8 or float32; None = 0."""
    group_size: int
    """Columns of a group; the last one may have fewer."""
    inputs: Inputs = Inputs.KEPT
    """INT8 with whole numbers only."""
    permutation: Tensor | None = None
    """(K,) int32 or None: column k of the stored weight belongs to column permutation[k] of x."""

    @property
    def shape(self) -> torch.Size:
        """(…, N, K)."""
        *rows, num_bytes = self.codes.shape
        return torch.Size((*rows, num_bytes * 8 // self.code.bits))

    def rows(self, rows: slice | Tensor) -> CodedWeight:
        """Some of N, of one weight; copies, if a tensor has their numbers."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return self._replace(codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)

    def of_expert(self, expert: int) -> CodedWeight:
        """(N, K), one of several."""
        zeros = None if self.zeros is None else self.zeros[expert]
        order = None if self.permutation is None else self.permutation[expert]
        return self._replace(codes=self.codes[expert], scales=self.scales[expert], zeros=zeros, permutation=order)

    def codes_by_column(self) -> Tensor:
        """(…, N, K) uint8: one code in each byte."""
        if self.code.bits == 8:
            return self.codes
        return torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(-2)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(…, N, K) with the columns in the order of x, computed in float32 and rounded once."""
        numbers = self.code.numbers().to(self.codes.device)[self.codes_by_column().int()]
        columns = numbers.shape[-1]

        def of_columns(values: Tensor) -> Tensor:
            return values.float().repeat_interleave(self.group_size, -1)[..., :columns]

        if self.zeros is not None:
            numbers = numbers - of_columns(self.zeros)
        weight = (numbers * of_columns(self.scales)).to(dtype)
        if self.permutation is None:
            return weight
        places = self.permutation.long().unsqueeze(-2).expand(weight.shape)
        return torch.empty_like(weight).scatter_(-1, places, weight)


def join_halves(codes: Tensor) -> Tensor:
    """Codes of 4 bits (…, K), one in each byte, as a CodedWeight has them: (…, K / 2)."""
    pairs = codes.view(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4
