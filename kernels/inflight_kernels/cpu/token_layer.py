"""A whole decoder layer, or the head, compiled into one program for steps of one token.

Knows no network. It reads plain weights, best from huge pages (`HugePageArena`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim

from inflight_kernels.cpu import graphs
from inflight_kernels.cpu.graphs import LayerShape
from inflight_kernels.cpu.program_cache import Program, load_program

_SOURCES = (Path(graphs.__file__), Path(__file__))
_EXAMPLE_BLOCKS = 9
"""Any width of a block table above 1, which torch.export would build in."""


class TokenLayer:
    """Shared by layers whose weights have the same shapes."""

    def __init__(
        self,
        shape: LayerShape,
        *,
        keys: Tensor,
        values: Tensor,
        cos_sin: Tensor,
        weights: Sequence[Tensor | None],
    ) -> None:
        """Examples: one layer's cache, and its weights in the order of graphs.TokenLayer's inputs, None for one that
        these layers do not have."""
        input_norm_D = weights[0]
        assert input_norm_D is not None
        hidden_1D = input_norm_D[None]
        table = torch.zeros((1, _EXAMPLE_BLOCKS), dtype=torch.int32)
        pool = {0: Dim("blocks", min=2, max=1 << 24)}
        inputs = [
            (hidden_1D.clone(), None),
            (hidden_1D.clone(), None),
            (torch.zeros(1, dtype=torch.int64), None),
            (torch.zeros(1, dtype=torch.int64), None),
            (table, {1: Dim("width", min=2, max=1 << 16)}),
            (torch.zeros(1, dtype=torch.int32), None),
            (keys, pool),
            (values, pool),
            (cos_sin, None),
            # torch.export makes one input of two that are the same object.
            *((None if weight is None else torch.empty_like(weight), None) for weight in weights),
        ]
        self._program: Program = load_program(
            "token_layer",
            graphs.TokenLayer(shape),
            [example for example, _ in inputs],
            [dynamic for _, dynamic in inputs],
            sources=_SOURCES,
        )

    def __call__(
        self,
        hidden_1D: Tensor,
        residual_1D: Tensor,
        position_1: Tensor,
        slot_1: Tensor,
        block_table_1L: Tensor,
        seq_len_1: Tensor,
        keys: Tensor,
        values: Tensor,
        cos_sin: Tensor,
        weights: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """(what the layer adds, its residual). The table is at least two blocks wide; `weights` are those there are."""
        row = [hidden_1D, residual_1D, position_1, slot_1, block_table_1L, seq_len_1]
        added_1D, residual_1D = self._program([*row, keys, values, cos_sin, *weights])
        return added_1D, residual_1D


class TokenProduct:
    """x @ weight.T of one row, for weights of one shape."""

    def __init__(self, weight_OI: Tensor) -> None:
        x_1I = weight_OI[:1].clone()
        self._program: Program = load_program(
            "token_product", graphs.TokenProduct(), [x_1I, weight_OI], [None, None], sources=_SOURCES
        )

    def __call__(self, x_1I: Tensor, weight_OI: Tensor) -> Tensor:
        return self._program([x_1I, weight_OI])[0]
