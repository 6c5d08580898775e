"""Where a checkpoint holds the matrices of a layer's experts: in tensors of their own, or stacked in one of some ways.

Reads no tensor. Legend: E experts, I intermediate size of an expert, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.models.checkpoint import Checkpoint
from inflight.models.family import ExpertTensors, StackedExperts


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """The part of a tensor that begins at `starts`."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    starts: tuple[int, ...]
    is_transposed: bool = False
    """(…, inputs, outputs)."""
    turn: tuple[int, int] = (0, 1)
    """Of a transposed one: the first of the columns from the start on that are its own, and of how many it is one."""


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Of one expert, from a rank's first intermediate feature on."""

    first: tuple[ExpertBlock, ...]
    """Gate and up, or up alone."""
    down: ExpertBlock


def find_layout(checkpoint: Checkpoint, tensors: ExpertTensors, prefix: str) -> StackedExperts | None:
    """How the experts are stacked; None if each has tensors of its own. `prefix` is that of the layer's tensors."""
    return next(
        (
            each
            for each in tensors.stacked
            if f"{prefix}{each.gate_up}" in checkpoint or f"{prefix}{each.gate_up}_blocks" in checkpoint
        ),
        None,
    )


def find_experts(
    layout: StackedExperts | None, tensors: ExpertTensors, prefix: str, hidden_size: int, first_feature: int
) -> Sequence[ExpertBlocks]:
    """The blocks of each expert, which reads and writes `hidden_size` features. A rank has the intermediate features
    from `first_feature` on."""
    num_experts, inner = tensors.num_experts, tensors.intermediate_size
    if layout is not None:
        gate_up, down = f"{prefix}{layout.gate_up}", f"{prefix}{layout.down}"
        sizes, num_first = (num_experts, inner, hidden_size), len(tensors.first_products)
        if layout.is_transposed:
            return [_transposed(gate_up, down, sizes, expert, first_feature) for expert in range(num_experts)]
        return [_stacked(gate_up, down, sizes, num_first, expert, first_feature) for expert in range(num_experts)]
    wide, tall = (inner, hidden_size), (hidden_size, inner)
    names = [f"{prefix}{tensors.experts}.{number}" for number in range(num_experts)]
    return [
        ExpertBlocks(
            first=tuple(
                ExpertBlock(f"{name}.{each}.weight", wide, (first_feature,)) for each in tensors.first_products
            ),
            down=ExpertBlock(f"{name}.{tensors.down}.weight", tall, (0, first_feature)),
        )
        for name in names
    ]


def _stacked(
    gate_up: str, down: str, sizes: tuple[int, int, int], num_first: int, expert: int, first: int
) -> ExpertBlocks:
    num_experts, inner, hidden_size = sizes
    wide = (num_experts, num_first * inner, hidden_size)
    return ExpertBlocks(
        first=tuple(ExpertBlock(gate_up, wide, (expert, place * inner + first)) for place in range(num_first)),
        down=ExpertBlock(down, (num_experts, hidden_size, inner), (expert, 0, first)),
    )


def _transposed(gate_up: str, down: str, sizes: tuple[int, int, int], expert: int, first: int) -> ExpertBlocks:
    num_experts, inner, hidden_size = sizes
    gate_and_up = tuple(
        ExpertBlock(gate_up, (num_experts, hidden_size, 2 * inner), (expert, 0, 2 * first), True, (place, 2))
        for place in range(2)
    )
    return ExpertBlocks(
        first=gate_and_up, down=ExpertBlock(down, (num_experts, inner, hidden_size), (expert, first), True)
    )
