"""A weight laid out for products that read it once and in order; native/panels.h draws the layout.

Legend: O output features, I input features, B rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.cpu.huge_pages import HugePageArena
from inflight_kernels.cpu.instructions import multiply
from inflight_kernels.cpu.library import NativeLibrary

STEP = 32
"""Input features come in multiples of it, and products read x in as many rows."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Made by `pack`."""

    library: NativeLibrary
    packed: Tensor
    num_outputs: int
    num_inputs: int

    @classmethod
    def pack(
        cls, library: NativeLibrary, weight_OI: Tensor, arena: HugePageArena, *, gated: bool = False
    ) -> PackedWeight:
        """`weight_OI`: bfloat16, I a multiple of 32. `gated`: gate above up, for the product that joins them, whose
        halves are multiples of 16."""
        num_outputs, num_inputs = weight_OI.shape
        if weight_OI.dtype != torch.bfloat16 or num_inputs % STEP or (gated and num_outputs % STEP):
            raise ValueError(f"cannot pack {weight_OI.dtype} {tuple(weight_OI.shape)}: bfloat16, multiples of {STEP}")
        packed = arena.take(library.functions.inflight_packed_size(num_outputs, num_inputs), torch.bfloat16)
        weight_OI = weight_OI.contiguous()
        library.functions.inflight_pack(
            weight_OI.data_ptr(), num_outputs, num_inputs, gated, torch.get_num_threads(), packed.data_ptr()
        )
        return cls(library, packed, num_outputs, num_inputs)

    def linear(self, x_BI: Tensor) -> Tensor:
        """x @ weight.T, (B, O) bfloat16, of a weight that is not gated."""
        num_rows = x_BI.shape[0]
        x = x_BI.new_empty(num_rows + STEP, self.num_inputs)
        x[:num_rows] = x_BI
        out_BO = x_BI.new_empty(num_rows, self.num_outputs)
        functions, instructions = self.library.functions, self.library.instructions
        multiply(functions, instructions, x, self.packed, out_BO, num_threads=torch.get_num_threads())
        return out_BO
