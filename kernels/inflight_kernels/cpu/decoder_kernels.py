"""The compiled programs of one network, loaded once and shared by its layers: same shapes, other weights.

Knows the order of no layer; `inflight` puts them together. Inputs and outputs are graphs.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class DecoderKernels:
    """Programs for layers of `shape`, given one layer's weights and cache as examples of their sizes."""

    def __init__(
        self, shape: LayerShape, cos_sin: Tensor, keys: Tensor, values: Tensor, weights: Sequence[Any]
    ) -> None:
        """`weights` are TokenLayer's, from input_norm_D on."""
        tokens = Dim("tokens", min=2, max=1 << 20)
        width = Dim("width", min=2, max=1 << 16)
        # The pool's size follows the machine's free memory: it must not be built in.
        pool = {0: Dim("blocks", min=2, max=1 << 24)}
        dtype, hidden = weights[0].dtype, weights[0].shape[0]
        qkv, gate_up = weights[1].shape[0], weights[8].shape[0]

        def batch(*sizes: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(_EXAMPLE_TOKENS, *sizes, dtype=of)

        def load(name: str, module: torch.nn.Module, inputs: list[Any], dynamic: list[Any]) -> Program:
            return load_program(name, module, inputs, dynamic, sources=_SOURCES)

        rows = {0: tokens}
        table = torch.zeros(_EXAMPLE_TOKENS, _EXAMPLE_BLOCKS, dtype=torch.int32)
        # Every input is a tensor of its own: torch.export makes one input of two that are the same object.
        self._add_norm = load(
            "add_norm", graphs.AddNorm(shape), [batch(hidden), batch(hidden), weights[0]], [rows, rows, None]
        )
        self._silu_and_mul = load("silu_and_mul", graphs.SiluAndMul(), [batch(gate_up)], [rows])
        self._rope_and_write = load(
            "rope_and_write",
            graphs.RopeAndWrite(shape),
            [batch(qkv), cos_sin, batch(of=torch.int64), keys, values, batch(of=torch.int64), *weights[3:5]],
            [rows, None, rows, pool, pool, rows, None, None],
        )
        self._decode_attention = load(
            "decode_attention",
            graphs.DecodeAttention(shape),
            [batch(shape.num_heads, shape.head_dim), keys, values, table, table[:, 0].contiguous()],
            [rows, pool, pool, {0: tokens, 1: width}, rows],
        )
        hidden_1D, residual_1D = batch(hidden)[:1].clone(), batch(hidden)[:1].clone()
        place, slot = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        steps = [cos_sin, place, slot, table[:1].clone(), table[:1, 0].clone()]
        self._token_layer = load(
            "token_layer",
            graphs.TokenLayer(shape),
            [hidden_1D, residual_1D, *steps, keys, values, *weights],
            [None, None, None, None, None, {1: width}, None, pool, pool, *[None] * len(weights)],
        )

    def add_norm(self, hidden_TD: Tensor, residual_TD: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
        normed_TD, residual_TD = self._add_norm([hidden_TD, residual_TD, weight_D])
        return normed_TD, residual_TD

    def silu_and_mul(self, gate_up_TI: Tensor) -> Tensor:
        return self._silu_and_mul([gate_up_TI])[0]

    def rope_and_write(self, *inputs: Tensor | None) -> Tensor:
        return self._rope_and_write([x for x in inputs if x is not None])[0]

    def decode_attention(self, *inputs: Tensor) -> Tensor:
        return self._decode_attention(list(inputs))[0]

    def token_layer(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden_1D, residual_1D = self._token_layer([x for x in inputs if x is not None])
        return hidden_1D, residual_1D


class HeadKernel:
    """The output product of one row, for weights (V, D)."""

    def __init__(self, weight_VD: Tensor) -> None:
        hidden_1D = torch.zeros(1, weight_VD.shape[1], dtype=weight_VD.dtype)
        self._head = load_program("head", graphs.Head(), [hidden_1D, weight_VD], [None, None], sources=_SOURCES)

    def __call__(self, hidden_1D: Tensor, weight_VD: Tensor) -> Tensor:
        return self._head([hidden_1D, weight_VD])[0]
