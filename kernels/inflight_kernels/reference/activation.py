"""The gated activation in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of the columns, times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
