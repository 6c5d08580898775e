"""Which function of a gate multiplies what a norm gives."""

from __future__ import annotations

import enum


class Gate(enum.Enum):
    SILU = "silu"
    """gate * sigmoid(gate)."""
    SIGMOID = "sigmoid"
    """1 / (1 + exp(-gate))."""
