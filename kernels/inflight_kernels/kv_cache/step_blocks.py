"""Where the layers of one group find and put what they keep of a step's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """Layers with equal windows may form a group that has blocks of its own. T tokens of the step."""

    slots_T: Tensor
    """int64, cache slot of what is kept of each token: block_id * block_size + offset; negative = not stored."""
    block_table: Tensor
    """int32 (any number of rows, most blocks of a sequence), the ids of each row's blocks. The elements of a row are
    side by side; rows may be farther apart."""
