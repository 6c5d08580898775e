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
_EXAMPLE_TOKENS, _EXAMPLE_BLOCKS = 6, 9
"""Any sizes above 1, which torch.export would build in."""


class _Programs:
    """Programs for one token, or for any number above."""

    def __init__(
        self,
        shape: LayerShape,
        cos_sin: Tensor,
        keys: Tensor,
        values: Tensor,
        norm: Tensor,
        qkv: int,
        gate_up: int,
        head_norm: Tensor | None,
        *,
        one_token: bool,
    ) -> None:
        num_tokens = 1 if one_token else _EXAMPLE_TOKENS
        rows = None if one_token else {0: Dim("tokens", min=2, max=1 << 20)}
        table_sizes = {**(rows or {}), 1: Dim("width", min=2, max=1 << 16)}
        # The pool's size follows the machine's free memory: it must not be built in.
        pool = {0: Dim("blocks", min=2, max=1 << 24)}
        hidden, suffix = norm.shape[0], "-1" if one_token else ""

        # Every input is a tensor of its own: torch.export makes one input of two that are the same object.
        def batch(*sizes: int, of: torch.dtype = norm.dtype) -> Tensor:
            return torch.zeros(num_tokens, *sizes, dtype=of)

        def load(name: str, module: torch.nn.Module, inputs: list[Any], dynamic: list[Any]) -> Program:
            return load_program(name + suffix, module, inputs, dynamic, sources=_SOURCES)

        self.add_norm = load(
            "add_norm", graphs.AddNorm(shape), [batch(hidden), batch(hidden), norm], [rows, rows, None]
        )
        self.silu_and_mul = load("silu_and_mul", graphs.SiluAndMul(), [batch(gate_up)], [rows])
        places, slots = batch(of=torch.int64), batch(of=torch.int64)
        other_head_norm = None if head_norm is None else head_norm.clone()
        self.rope_and_write = load(
            "rope_and_write",
            graphs.RopeAndWrite(shape),
            [batch(qkv), cos_sin, places, keys, values, slots, head_norm, other_head_norm],
            [rows, None, rows, pool, pool, rows, None, None],
        )
        self.decode_attention = load(
            "decode_attention",
            graphs.DecodeAttention(shape),
            [
                batch(shape.num_heads, shape.head_dim),
                keys,
                values,
                batch(_EXAMPLE_BLOCKS, of=torch.int32),
                batch(of=torch.int32),
            ],
            [rows, pool, pool, table_sizes, rows],
        )


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
        examples = (shape, cos_sin, keys, values, norm, qkv, gate_up, head_norm)
        self._batch = _Programs(*examples, one_token=False)
        self._token = _Programs(*examples, one_token=True)

    def add_norm(self, hidden_TD: Tensor, residual_TD: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(sum), sum)."""
        normed_TD, sum_TD = self._for(hidden_TD).add_norm([hidden_TD, residual_TD, weight_D])
        return normed_TD, sum_TD

    def silu_and_mul(self, gate_up_TI: Tensor) -> Tensor:
        """silu(gate) * up."""
        return self._for(gate_up_TI).silu_and_mul([gate_up_TI])[0]

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
        return self._for(qkv_TC).rope_and_write(inputs)[0]

    def decode_attention(
        self, q_BHE: Tensor, keys: Tensor, values: Tensor, block_table_BL: Tensor, seq_lens_B: Tensor
    ) -> Tensor:
        """(B, H, E); the table is at least two blocks wide."""
        return self._for(q_BHE).decode_attention([q_BHE, keys, values, block_table_BL, seq_lens_B])[0]

    def _for(self, rows: Tensor) -> _Programs:
        return self._token if rows.shape[0] == 1 else self._batch
