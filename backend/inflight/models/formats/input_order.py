"""The order of a layer's inputs in which those of each group are neighbours.

GPTQ may put inputs with similar activations into one group (act-order). The checkpoint keeps them in their places, with
the number of each one's group. Legend: I input features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.errors import ConfigurationError
from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.format import Block


def read_input_order(checkpoint: Checkpoint, name: str, num_inputs: int, group_size: int) -> Tensor | None:
    """(I,) int32: the inputs by their groups, those of one in their order; None = as they are. `name`: of the tensor
    (I,) of groups, each of `group_size` inputs, but for a smaller last one. Raises ConfigurationError."""
    group_I = checkpoint.read_order(name, num_inputs)
    order_I = group_I.argsort(stable=True)
    by_group_I = torch.arange(num_inputs, dtype=torch.int32) // group_size
    if not torch.equal(group_I[order_I], by_group_I):
        raise ConfigurationError(
            f"{checkpoint.folder}: tensor {name} does not divide the {num_inputs} inputs into groups of {group_size}"
        )
    return None if torch.equal(group_I, by_group_I) else order_I.int()


def is_common(orders: Sequence[Tensor | None], blocks: Sequence[Block]) -> bool:
    """Whether one weight can have the codes of all blocks: in one order, and, if that is another one, of all inputs,
    because the groups of a rank's share are not whole."""
    first, block = orders[0], blocks[0]
    if first is None:
        return all(order is None for order in orders)
    is_whole = len(block.inputs) == block.num_inputs
    return is_whole and all(order is not None and torch.equal(order, first) for order in orders)
