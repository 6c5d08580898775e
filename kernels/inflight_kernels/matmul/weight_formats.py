"""Memory layouts of quantised weights, and conversion to them, once at load time. How checkpoints store
such weights is the engine's to know.

8 bits: (N, K) float8_e4m3fn or int8 with a float32 scale for each output channel; w = q * scale. Or float8_e4m3fn with
one for each block of outputs and inputs (`BlockScaledWeight`).

4 bits: w[n, k] = (q[n, k] - zero[g, n]) * scale[g, n] with q and zero whole numbers and g the group of k. `Int4Weight`
stores q as the kernel reads it. K is divided into blocks of 128 (the last one padded). In a block, row n is 32 words of
16 bits, and word j holds the values of four k that are 32 apart, one in each nibble:

    qweight[b, n, j]   bits 15..12      11..8       7..4        3..0
                       k = 128 b + 96+j  64+j       32+j         j         j = 0..31

So each shift of a tile of words gives 32 neighbouring columns of the weight, in the registers that they were loaded to,
and 128 rows of a block are contiguous, 8 KiB. Scale and zero point of a group and row are one word of 32 bits:

    scale_zero[g, n]   bits 31..16: scale[g, n]      15..0: base + zero[g, n]      both as bfloat16, or both as float16

base is 128 in bfloat16 and 1024 in float16: a nibble set into the last bits of this number adds its own value to it.

Knows no kernel and no device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_INPUTS = 128
"""Inputs that share a scale in `block_scaled_linear`, those of a weight and those of a token."""
INT4_BLOCK = 128
"""Columns of a weight per block of an Int4Weight."""
INT4_PLANE = 32
"""Columns that are held by the same nibble of a row's words; a group must consist of whole planes."""
INT4_BASE = {torch.bfloat16: 128, torch.float16: 1024}
"""The power of two whose last mantissa bit has the value 1, by the dtype that a 4-bit weight is dequantised to."""
QUANTIZED_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest magnitude of each 8-bit dtype that weights and activations are quantised to."""


class BlockScaledWeight(NamedTuple):
    """A weight (N, K) of fp8, w[n, k] = values[n, k] * scales[n / block_outputs, k / BLOCK_INPUTS]; or several
    (E, N, K), whose tensors then both have the leading dimension E."""

    values: Tensor
    """(N, K) float8_e4m3fn."""
    scales: Tensor
    """(ceil(N / block_outputs), ceil(K / BLOCK_INPUTS)) float32, contiguous."""
    block_outputs: int
    """Outputs that share a row of scales."""

    @property
    def shape(self) -> torch.Size:
        """(..., N, K)."""
        return self.values.shape

    def of_expert(self, expert: int) -> BlockScaledWeight:
        """(N, K), one of several."""
        return self._replace(values=self.values[expert], scales=self.scales[expert])

    def dequantize(self) -> Tensor:
        """(N, K) float32."""
        num_outputs, num_inputs = self.values.shape
        of_output = self.scales.repeat_interleave(self.block_outputs, 0)[:num_outputs]
        return self.values.float() * of_output.repeat_interleave(BLOCK_INPUTS, 1)[:, :num_inputs]


class Int4Weight(NamedTuple):
    """A 4-bit weight (N, K) in the layout described above."""

    qweight: Tensor
    """(ceil(K / 128), N, 32) int16."""
    scale_zero: Tensor
    """(K / group_size, N) int32."""
    dtype: torch.dtype
    """The dtype that it is dequantised to: bfloat16 or float16."""
    in_features: int
    """K."""
    permutation: Tensor | None = None
    """(K,) int64 or None: column k of the stored weight belongs to column permutation[k] of x."""

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.in_features // self.scale_zero.shape[0]

    def scales_and_zeros(self) -> tuple[Tensor, Tensor]:
        """Both (K / group_size, N): scales of `dtype`, zero points int32."""
        bits = torch.stack([self.scale_zero >> 16, self.scale_zero]).to(torch.int16).view(self.dtype)
        return bits[0], bits[1].int() - INT4_BASE[self.dtype]

    def whole_numbers(self) -> Tensor:
        """q (N, K), int32, with the columns in the order of storage."""
        planes = torch.stack([self.qweight.int() >> shift & 15 for shift in (0, 4, 8, 12)], 2)
        return planes.permute(1, 0, 2, 3).reshape(self.qweight.shape[1], -1)[:, : self.in_features]

    def dequantize(self) -> Tensor:
        """The float weight (N, K), with the columns in the order of x, rounded once to its dtype."""
        scales, zeros = (t.repeat_interleave(self.group_size, 0).T for t in self.scales_and_zeros())
        weight = ((self.whole_numbers() - zeros) * scales.float()).to(self.dtype)
        if self.permutation is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[:, self.permutation] = weight
        return ordered


def quantize_weight(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(N, K) float to (N, K) float8_e4m3fn or int8 and (N,) float32 scales: absmax / max, 1 for a row of zeros."""
    if dtype not in QUANTIZED_MAX:
        raise ValueError(f"weights are quantised to float8_e4m3fn or int8, not to {dtype}")
    limit = QUANTIZED_MAX[dtype]
    values = weight.float()
    absmax = values.abs().amax(1)
    scale = torch.where(absmax > 0, absmax / limit, 1.0)
    scaled = (values / scale[:, None]).clamp(-limit, limit)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def pack_int4(q: Tensor, scales: Tensor, zeros: Tensor, permutation: Tensor | None = None) -> Int4Weight:
    """`q` (N, K) and `zeros` (G, N), whole numbers 0 to 15 and 0 to 16, with `scales` (G, N) as an Int4Weight.

    The weight's dtype is that of the scales, bfloat16 or float16. If K is not a multiple of 128, it is padded with 0.
    """
    rows, columns = q.shape
    groups = scales.shape[0]
    if scales.dtype not in INT4_BASE:
        raise ValueError(f"scales of a 4-bit weight must be float16 or bfloat16, got {scales.dtype}")
    if scales.shape != (groups, rows) or zeros.shape != (groups, rows):
        raise ValueError(
            f"a weight of {rows} rows needs scales and zeros (groups, {rows}), got {tuple(scales.shape)} and "
            f"{tuple(zeros.shape)}"
        )
    if columns % groups or (columns // groups) % INT4_PLANE:
        raise ValueError(f"groups must hold a multiple of {INT4_PLANE} columns, got {columns} in {groups} groups")
    blocks = -(-columns // INT4_BLOCK)
    padded = q.new_zeros((rows, blocks * INT4_BLOCK), dtype=torch.int32)
    padded[:, :columns] = q
    planes = padded.view(rows, blocks, 4, INT4_PLANE).permute(2, 1, 0, 3)
    words = planes[0] | planes[1] << 4 | planes[2] << 8 | planes[3] << 12
    high = scales.contiguous().view(torch.int16).int() << 16
    low = (zeros + INT4_BASE[scales.dtype]).to(scales.dtype).view(torch.int16).int()
    return Int4Weight(words.to(torch.int16).contiguous(), high | low, scales.dtype, columns, permutation)
