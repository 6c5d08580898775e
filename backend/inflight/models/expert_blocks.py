"""Where a checkpoint holds the matrices of a layer's experts: as tensors of their own, or stacked.

transformers' `save_pretrained` writes the names of the published checkpoints, and with `save_original_format=False` its
own: one tensor for gate and up of all experts, one for down, whatever the family. Reads no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.models.checkpoint import Checkpoint
from inflight.models.family import ExpertTensors

STACKED_ROUTER, STACKED_GATE_UP, STACKED_DOWN = "mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""Names within a layer."""


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """The part of a tensor that begins at `starts`."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Of one expert, from a rank's first intermediate feature on."""

    gate: ExpertBlock
    up: ExpertBlock
    down: ExpertBlock


def find_experts(
    checkpoint: Checkpoint, tensors: ExpertTensors, prefix: str, hidden_size: int, first_feature: int
) -> tuple[str, Sequence[ExpertBlocks]]:
    """Name of the router, and the blocks of each expert. `prefix` is that of the layer's tensors; a rank has the
    intermediate features from `first_feature` on."""
    num_experts, inner = tensors.num_experts, tensors.intermediate_size
    wide, tall = (inner, hidden_size), (hidden_size, inner)
    gate_up, down = f"{prefix}{STACKED_GATE_UP}", f"{prefix}{STACKED_DOWN}"
    if gate_up in checkpoint:
        stacked_wide, stacked_tall = (num_experts, 2 * inner, hidden_size), (num_experts, *tall)
        return f"{prefix}{STACKED_ROUTER}", [
            ExpertBlocks(
                gate=ExpertBlock(gate_up, stacked_wide, (expert, first_feature)),
                up=ExpertBlock(gate_up, stacked_wide, (expert, inner + first_feature)),
                down=ExpertBlock(down, stacked_tall, (expert, 0, first_feature)),
            )
            for expert in range(num_experts)
        ]
    names = [f"{prefix}{tensors.experts}.{number}" for number in range(num_experts)]
    return f"{prefix}{tensors.router.name}", [
        ExpertBlocks(
            gate=ExpertBlock(f"{name}.{tensors.gate}.weight", wide, (first_feature,)),
            up=ExpertBlock(f"{name}.{tensors.up}.weight", wide, (first_feature,)),
            down=ExpertBlock(f"{name}.{tensors.down}.weight", tall, (0, first_feature)),
        )
        for name in names
    ]
