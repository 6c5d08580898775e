"""The compiled programs of one network, loaded once and shared by its layers: same shapes, other weights.

Knows the order of no layer; `inflight` puts them together. Inputs and outputs are graphs.py's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from inflight_kernels.cpu import graphs
from inflight_kernels.cpu.graphs import LayerShape
from inflight_kernels.cpu.program_cache import Program, load_program

_SOURCES = (Path(graphs.__file__), Path(__file__))
_TOKENS, _BLOCKS = 6, 9
"""Examples: any sizes above 1, which torch.export would build in. What they make runs with one token too."""
_ROWS = {0: Dim("tokens", min=2, max=1 << 20)}
_WIDTH = {1: Dim("width", min=2, max=1 << 16)}
_POOL = {0: Dim("blocks", min=2, max=1 << 24)}
"""The pool's size follows the machine's free memory: it must not be built in."""


class DecoderKernels:
    """What a decoder layer does between its matrix products. Shapes and rounding as in `inflight_kernels`."""

    def __init__(
        self,
        shape: LayerShape,
        *,
        cos_sin: Tensor,
        keys: Tensor,
        values: Tensor,
        norm: Tensor,
        qkv: int,
        gate_up: int,
        head_norm: Tensor | None,
    ) -> None:
        """One layer's cache (`keys`, `values`), norm weight and, if it has them, norm weight of its heads, as examples
        of their sizes; `qkv` and `gate_up` are output features."""

        # Every input is a tensor of its own: torch.export makes one input of two that are the same object.
        def batch(*sizes: int, of: torch.dtype = norm.dtype) -> Tensor:
            return torch.zeros(_TOKENS, *sizes, dtype=of)

        hidden = norm.shape[0]
        self._add_norm = _load(
            "add_norm", graphs.AddNorm(shape), [batch(hidden), batch(hidden), norm], [_ROWS, _ROWS, None]
        )
        self._silu_and_mul = _load("silu_and_mul", graphs.SiluAndMul(), [batch(gate_up)], [_ROWS])
        places, slots = batch(of=torch.int64), batch(of=torch.int64)
        other_head_norm = None if head_norm is None else head_norm.clone()
        self._rope_and_write = _load(
            "rope_and_write",
            graphs.RopeAndWrite(shape),
            [batch(qkv), cos_sin, places, keys, values, slots, head_norm, other_head_norm],
            [_ROWS, None, _ROWS, _POOL, _POOL, _ROWS, None, None],
        )
        table, lengths = batch(_BLOCKS, of=torch.int32), batch(of=torch.int32)
        self._decode_attention = _load(
            "decode_attention",
            graphs.DecodeAttention(shape),
            [batch(shape.num_heads, shape.head_dim), keys, values, table, lengths],
            [_ROWS, _POOL, _POOL, {**_ROWS, **_WIDTH}, _ROWS],
        )

    def add_norm(self, hidden_TD: Tensor, residual_TD: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(sum), sum)."""
        normed_TD, sum_TD = self._add_norm([hidden_TD, residual_TD, weight_D])
        return normed_TD, sum_TD

    def silu_and_mul(self, gate_up_TI: Tensor) -> Tensor:
        """silu(gate) * up."""
        return self._silu_and_mul([gate_up_TI])[0]

    def rope_and_write(
        self,
        qkv_TC: Tensor,
        cos_sin: Tensor,
        positions_T: Tensor,
        keys: Tensor,
        values: Tensor,
        slot_mapping_T: Tensor,
        q_norm_E: Tensor | None,
        k_norm_E: Tensor | None,
    ) -> Tensor:
        """Rotated queries (T, H, E); every slot is written, so none may be negative."""
        inputs = [qkv_TC, cos_sin, positions_T, keys, values, slot_mapping_T]
        if q_norm_E is not None and k_norm_E is not None:
            inputs += [q_norm_E, k_norm_E]
        return self._rope_and_write(inputs)[0]

    def decode_attention(
        self, q_BHE: Tensor, keys: Tensor, values: Tensor, block_table_BL: Tensor, seq_lens_B: Tensor
    ) -> Tensor:
        """(B, H, E); the table is at least two blocks wide."""
        return self._decode_attention([q_BHE, keys, values, block_table_BL, seq_lens_B])[0]


def _load(name: str, module: torch.nn.Module, inputs: list[Any], dynamic: list[Any]) -> Program:
    return load_program(name, module, inputs, dynamic, sources=_SOURCES)
